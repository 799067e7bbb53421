import { Code, ConnectError, createClient } from "@connectrpc/connect";
import { createConnectTransport } from "@connectrpc/connect-web";
import { ChatRole } from "./gen/millstream/v1/chat_pb.js";
import { ProcessorService } from "./gen/millstream/v1/processor_pb.js";

/** Asks a question; calls `show` with each piece of the answer. `signal` of an AbortController stops it. */
export async function ask(baseUrl, apiKey, question, show, signal) {
  const withKey = (next) => (request) => {
    if (apiKey) request.header.set("authorization", `Bearer ${apiKey}`);
    return next(request);
  };
  const transport = createConnectTransport({ baseUrl, useBinaryFormat: true, interceptors: [withKey] });
  const processor = createClient(ProcessorService, transport);
  const messages = [{ role: ChatRole.USER, content: [{ part: { case: "text", value: question } }] }];
  const options = { sampling: { maxNewTokens: 100 } };
  try {
    const responses = processor.chatOnce({ start: { messages, options } }, { signal, timeoutMs: 60_000 });
    for await (const { choices, finished } of responses) {
      for (const { text } of choices) show(text);
      if (finished) return finished.usage;
    }
  } catch (failed) {
    const error = ConnectError.from(failed);
    if (error.code === Code.Canceled) return undefined; // by the signal
    const busy = error.code === Code.ResourceExhausted || error.code === Code.Unavailable;
    throw busy ? new Error("the server is busy; try again in a moment") : error;
  }
}
