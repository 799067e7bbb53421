// Asks one question and prints the answer as it comes; Ctrl-C ends it: node ask.js 127.0.0.1:50051 MODEL [TOKENS]
import { credentials, Metadata, type ServiceError } from "@grpc/grpc-js";
import {
  ChatRequest,
  type ChatResponse,
  ChatRole,
  failureOf,
  ProcessorServiceClient,
  recommendedServiceConfig,
} from "@millstream/grpc";

const [addresses, model, tokens = "5"] = process.argv.slice(2);
const processor = new ProcessorServiceClient(
  `ipv4:${addresses}`, // a list; a DNS name is `dns:///name:50051`
  credentials.createInsecure(), // credentials.createSsl() for a server with TLS
  { "grpc.service_config": recommendedServiceConfig },
);
const metadata = new Metadata({ waitForReady: true }); // of the service config grpc-js doesn't read it
const key = process.env["MILLSTREAM_API_KEY"];
if (key) metadata.set("authorization", `Bearer ${key}`);

const call = processor.chat(metadata, { deadline: Date.now() + 60_000 });
const start = {
  model: model ?? "",
  messages: [{ role: ChatRole.USER, content: [{ part: { $case: "text" as const, value: "Hello" } }] }],
  options: { sampling: { maxNewTokens: Number(tokens) } },
};
call.write(ChatRequest.create({ message: { $case: "start", value: start } }));
// A message ends the turn and keeps the conversation; call.cancel() ends the whole call.
process.once("SIGINT", () => {
  call.write(ChatRequest.create({ message: { $case: "cancel", value: { turn: 1 } } }));
});
try {
  const responses: AsyncIterable<ChatResponse> = call;
  for await (const { choices, finished } of responses) {
    for (const { text } of choices) process.stdout.write(text);
    if (finished) {
      console.log(`\n${finished.usage?.completionTokens} tokens`);
      call.end(); // or ask again, with `userTurn`
    }
  }
} catch (error) {
  const failure = failureOf(error); // undefined for what the library says itself: a deadline, a lost connection
  console.error(`${failure?.reason ?? "no reason"}: ${(error as ServiceError).details}`);
  process.exitCode = 1;
} finally {
  call.cancel(); // leaving the loop early doesn't; after the end it has no effect
  processor.close();
}
