// LangChain's model with a tool, whole and streamed; the loop is this file's.
// Prints each answer as a line of JSON.
import { HumanMessage } from "@langchain/core/messages";
import { tool } from "@langchain/core/tools";
import { ChatOpenAI } from "@langchain/openai";

const [address] = process.argv.slice(2);
const look = tool(() => "-3", {
  name: "f",
  description: "Look at a thermometer.",
  schema: { type: "object", properties: { s: { type: "string" } } },
});

const model = new ChatOpenAI({
  model: "tiny",
  apiKey: "any",
  maxRetries: 0,
  configuration: { baseURL: `http://${address}/v1` },
}).bindTools([look]);

async function streamed(messages) {
  let answer;
  for await (const piece of await model.stream(messages)) {
    answer = answer ? answer.concat(piece) : piece;
  }
  return answer;
}

// Not the option `streaming`: it counts tokens with a file from the network.
for (const ask of [(messages) => model.invoke(messages), streamed]) {
  const messages = [new HumanMessage("Is it cold?")];
  for (;;) {
    const answer = await ask(messages);
    const calls = answer.tool_calls.map((call) => [call.name, call.args]);
    const used = answer.usage_metadata.output_tokens;
    console.log(JSON.stringify({ text: answer.content, calls, used }));
    if (calls.length === 0) break;
    messages.push(answer);
    for (const call of answer.tool_calls) messages.push(await look.invoke(call));
  }
}
