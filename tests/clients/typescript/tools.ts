// Lets the model call a clock and a calculator: node tools.js 127.0.0.1:50051 "What is 17 times 23?"
import { credentials } from "@grpc/grpc-js";
import {
  ChatOutput,
  ChatRequest,
  ChatRole,
  FinishReason,
  ProcessorServiceClient,
  oneServerServiceConfig,
  type ChatResponse,
  type ToolCall,
} from "@millstream/grpc";

const mostRounds = 8;
const tools = [
  { name: "clock", description: "Tell the time.", parametersJsonSchema: "" },
  {
    name: "calculate",
    description: "Work out an expression, such as 6 * 7.",
    parametersJsonSchema: JSON.stringify({
      type: "object",
      properties: { expression: { type: "string" } },
      required: ["expression"],
    }),
  },
];

async function ask(address: string, question: string): Promise<void> {
  const processor = new ProcessorServiceClient(
    address,
    credentials.createInsecure(), // a server without TLS
    { "grpc.service_config": oneServerServiceConfig },
  );
  const call = processor.chat({ deadline: Date.now() + 60_000 });
  const responses = call[Symbol.asyncIterator]() as AsyncIterator<ChatResponse>;
  try {
    let next = start(question);
    for (let round = 0; round <= mostRounds; round++) {
      call.write(next);
      const calls = await read(responses);
      if (calls.length === 0) return;
      next = results(calls);
    }
    throw new Error(`the model still calls tools after ${mostRounds} rounds`);
  } finally {
    call.cancel();
    processor.close();
  }
}

/** Prints an answer while it comes; returns its calls. */
async function read(responses: AsyncIterator<ChatResponse>): Promise<ToolCall[]> {
  let calls: ToolCall[] = [];
  for (;;) {
    const { value, done } = await responses.next();
    if (done) throw new Error("the stream ended before the answer did");
    for (const choice of value.choices) {
      for (const { event } of choice.events) {
        if (event?.$case === "text") process.stdout.write(event.value);
      }
      // Whole, in the last delta. With another finish reason there may be some that were cut.
      if (choice.finishReason === FinishReason.TOOL_CALLS) calls = choice.toolCalls;
    }
    if (value.finished) {
      process.stdout.write("\n");
      return calls;
    }
  }
}

function start(question: string): ChatRequest {
  const messages = [{ role: ChatRole.USER, content: text(question) }];
  return ChatRequest.create({
    message: { $case: "start", value: { messages, tools, output: ChatOutput.EVENTS } },
  });
}

function results(calls: ToolCall[]): ChatRequest {
  const messages = calls
    .filter((call) => !call.incomplete) // that isn't part of the conversation
    .map((call) => ({
      role: ChatRole.TOOL,
      toolCallId: call.id,
      content: text(run(call.name, call.argumentsJson)),
    }));
  return ChatRequest.create({ message: { $case: "toolResults", value: { messages } } });
}

/** Returns what the model gets: a result, or a sentence that says what is wrong. */
function run(name: string, argumentsJson: string): string {
  if (name === "clock") return new Date().toTimeString().slice(0, 5);
  if (name !== "calculate") return `error: there is no tool ${name}`;
  const { expression } = JSON.parse(argumentsJson) as { expression?: unknown };
  const [left, sign, right, ...more] = String(expression).split(" ");
  if (right === undefined || more.length > 0) {
    return "error: write two numbers and a sign between them";
  }
  const a = Number(left);
  const b = Number(right);
  const values: Record<string, number> = { "+": a + b, "-": a - b, "*": a * b, "/": a / b };
  return String(values[sign ?? ""] ?? `error: there is no sign ${sign}`);
}

function text(value: string) {
  return [{ part: { $case: "text" as const, value } }];
}

const [address = "127.0.0.1:50051", question = "What time is it?"] = process.argv.slice(2);
await ask(address, question);
