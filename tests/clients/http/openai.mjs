// OpenAI's client for Node.js: models, an answer in events, the tool loop, a refusal.
// Prints what it has found as one JSON object.
import OpenAI from "openai";

const [address] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `http://${address}/v1`, apiKey: "any", maxRetries: 0 });

const models = await client.models.list();
const model = (await client.models.retrieve(models.data[0].id)).id;
const messages = [{ role: "user", content: "Is it cold?" }];

let reasoning = "";
let text = "";
let usage = null;
const events = await client.chat.completions.create({
  model,
  messages,
  stream: true,
  stream_options: { include_usage: true },
});
for await (const event of events) {
  reasoning += event.choices[0]?.delta.reasoning_content ?? "";
  text += event.choices[0]?.delta.content ?? "";
  usage = event.usage ?? usage;
}

const calls = [];
const tool = {
  type: "function",
  function: {
    name: "f",
    parse: JSON.parse,
    parameters: { type: "object", properties: { s: { type: "string" } } },
    function: (given) => {
      calls.push(given);
      return "-3";
    },
  },
};
const loop = client.chat.completions.runTools({ model, messages, tools: [tool], stream: true });
const answer = await loop.finalContent();

const refused = await client.chat.completions
  .create({ model: "none", messages })
  .catch((error) => [error.status, error.code, error.requestID !== null]);

console.log(JSON.stringify({ model, reasoning, text, usage, calls, answer, refused }));
