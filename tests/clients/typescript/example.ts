/** A client of Millstream in TypeScript; tests/support/clients/client_examples.py says what it does. */
import { promisify } from "node:util";
import { credentials, Metadata, status, type ServiceError } from "@grpc/grpc-js";
import {
  ChatRequest,
  type ChatResponse,
  ChatRole,
  CompleteRequest,
  failureOf,
  FinishReason,
  finishReasonToJSON,
  GenerationOptions,
  ProcessorServiceClient,
  recommendedServiceConfig,
} from "@millstream/grpc";
import {
  HealthCheckRequest,
  type HealthCheckResponse,
  healthCheckResponse_ServingStatusToJSON,
  HealthClient,
} from "@millstream/grpc/health";

const environment = process.env as Record<string, string>;
const model = environment["MILLSTREAM_MODEL"] ?? "";

// One channel for all services and calls. `ipv4:` takes a list; a DNS name is `dns:///name:50051`.
const channelOptions = { "grpc.service_config": recommendedServiceConfig };
const processor = new ProcessorServiceClient(
  `ipv4:${environment["MILLSTREAM_ADDRESSES"]}`,
  credentials.createInsecure(), // credentials.createSsl() for a server with TLS
  channelOptions,
);
const health = new HealthClient("ipv4:", credentials.createInsecure(), {
  channelOverride: processor.getChannel(),
});

function metadata(): Metadata {
  const sent = new Metadata({ waitForReady: true }); // of the service config grpc-js doesn't read it
  sent.set("authorization", `Bearer ${environment["MILLSTREAM_API_KEY"]}`);
  sent.set("traceparent", environment["TRACEPARENT"]!);
  return sent;
}

function after(seconds: number): { deadline: number } {
  return { deadline: Date.now() + seconds * 1000 };
}

function tokens(count: number): GenerationOptions {
  return GenerationOptions.create({ sampling: { maxNewTokens: count, ignoreEos: true } });
}

function print(event: string, values: object): void {
  console.log(JSON.stringify({ event, ...values }));
}

async function askForHealth(): Promise<void> {
  const check = promisify(
    (request: HealthCheckRequest, done: (e: ServiceError | null, r: HealthCheckResponse) => void) =>
      health.check(request, metadata(), after(10), done),
  );
  const answer = await check({ service: "millstream.v1.ProcessorService" });
  print("health", { status: healthCheckResponse_ServingStatusToJSON(answer.status) });
}

/** Two turns on one stream; the first is cancelled after its third message. */
async function chat(): Promise<void> {
  const call = processor.chat(metadata(), after(30));
  const content = (text: string) => [{ part: { $case: "text" as const, value: text } }];
  const messages = [{ role: ChatRole.USER, content: content("Hello") }];
  call.write(
    ChatRequest.create({
      message: { $case: "start", value: { model, messages, options: tokens(400) } },
    }),
  );
  let deltas = 0;
  try {
    const responses: AsyncIterable<ChatResponse> = call;
    for await (const { turn, choices, finished } of responses) {
      for (const { text, finishReason } of choices) {
        if (text) print("delta", { turn, text });
        if (text && ++deltas === 3) {
          call.write(ChatRequest.create({ message: { $case: "cancel", value: { turn } } }));
        }
        if (finishReason !== FinishReason.UNSPECIFIED) {
          print("finished", {
            turn,
            finish_reason: finishReasonToJSON(finishReason),
            completion_tokens: finished?.usage?.completionTokens,
          });
        }
      }
      if (finished && turn === 1) {
        call.write(
          ChatRequest.create({
            message: { $case: "userTurn", value: { content: content("Go on"), options: tokens(5) } },
          }),
        );
      } else if (finished) {
        call.end();
      }
    }
  } finally {
    call.cancel(); // leaving the loop early doesn't; after the end it has no effect
  }
  print("ended", { call: "chat", code: "OK" });
}

/** Run one completion; returns the error it ended with. */
async function complete(
  request: CompleteRequest,
  { sent = metadata(), seconds = 10 } = {},
): Promise<ServiceError | undefined> {
  try {
    for await (const _ of processor.complete(request, sent, after(seconds)));
    return undefined;
  } catch (error) {
    return error as ServiceError;
  }
}

function explain(call: string, error: ServiceError | undefined): void {
  const failure = failureOf(error);
  print("error", {
    call,
    code: status[error?.code ?? status.OK],
    message: error?.details,
    reason: failure?.reason,
    domain: failure?.domain,
    retryable: failure?.retryable,
    violations: failure?.violations,
    retry_delay_s: failure?.retryDelayMs === undefined ? null : failure.retryDelayMs / 1000,
  });
}

function prompt(options: GenerationOptions, asked = model): CompleteRequest {
  return CompleteRequest.create({ model: asked, prompt: { $case: "text", value: "Hi" }, options });
}

await askForHealth();
await chat();
const late = await complete(prompt(tokens(400)), { seconds: 0.5 });
print("ended", { call: "deadline", code: status[late?.code ?? status.OK] });
const invalid = GenerationOptions.create({ sampling: { topP: 2 } });
explain("invalid", await complete(prompt(invalid)));
explain("overloaded", await complete(prompt(tokens(1), environment["MILLSTREAM_FULL_MODEL"])));
explain("no_key", await complete(prompt(tokens(1)), { sent: new Metadata() }));
let calls = 0;
for (; calls < Number(environment["MILLSTREAM_CALLS"]); calls++) {
  const error = await complete(prompt(tokens(1)));
  if (error) throw error;
}
print("balanced", { calls });
processor.close();
