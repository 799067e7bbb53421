// Calls a Processor by the clients that browsers have, and by Connect's for Node: `calls.mjs URL DESCRIPTORS MODEL`.
// Prints one line of JSON with what each has got.
import { readFileSync } from "node:fs";
import { create, createFileRegistry, fromBinary, toBinary } from "@bufbuild/protobuf";
import { FileDescriptorSetSchema } from "@bufbuild/protobuf/wkt";
import { Code, ConnectError, createClient } from "@connectrpc/connect";
import * as node from "@connectrpc/connect-node";
import * as web from "@connectrpc/connect-web";
import grpcWeb from "grpc-web";
import * as contract from "./gen/millstream/v1/processor_pb.js";
import { ask } from "./ask.mjs";
import { Request } from "./request.mjs";

const [baseUrl, descriptors, model] = process.argv.slice(2);
const { ProcessorService } = contract;
const registry = createFileRegistry(fromBinary(FileDescriptorSetSchema, readFileSync(descriptors)));
globalThis.XMLHttpRequest = Request;
const BadRequest = registry.getMessage("google.rpc.BadRequest");

const start = (maxNewTokens) => ({
  model,
  messages: [{ role: 3, content: [{ part: { case: "text", value: "Hello" } }] }],
  options: { sampling: { maxNewTokens, ignoreEos: true } },
});
const textOf = ({ choices }) => choices.map(({ text }) => text).join("");

async function failure(calling) {
  try {
    await calling();
  } catch (failed) {
    const error = ConnectError.from(failed);
    const fields = error.findDetails(BadRequest).flatMap((d) => d.fieldViolations.map((v) => v.field));
    return { code: Code[error.code], message: error.rawMessage, fields };
  }
  return undefined;
}

async function byConnect(transport, duplex) {
  const client = createClient(ProcessorService, transport);
  const got = {};
  got.unary = (await client.tokenize({ model, input: { case: "text", value: "Hello" } })).tokenIds.length;
  const pieces = [];
  let usage;
  for await (const response of client.chatOnce({ start: start(5) })) {
    pieces.push(textOf(response));
    usage = response.finished?.usage ?? usage;
  }
  got.stream = { text: pieces.join(""), tokens: usage.completionTokens };
  const wrong = { model, prompt: { case: "text", value: "Hello" }, options: { sampling: { topP: 2 } } };
  const each = async (responses) => {
    for await (const _ of responses);
  };
  got.error = await failure(() => each(client.complete(wrong)));
  got.unaryError = await failure(() => client.tokenize({ model }));
  got.missing = await failure(() => client.tokenize({ model: "none", input: { case: "text", value: "a" } }));
  const abort = new AbortController();
  got.cancel = await failure(async () => {
    for await (const _ of client.chatOnce({ start: start(4000) }, { signal: abort.signal })) abort.abort();
  });
  got.deadline = await failure(() => each(client.chatOnce({ start: start(4000) }, { timeoutMs: 300 })));
  if (duplex) got.turns = await turns(client);
  return got;
}

/** A chat of two turns: the second question is sent when the first one is answered. */
async function turns(client) {
  let answered;
  const first = new Promise((resolve) => (answered = resolve));
  async function* say() {
    yield { message: { case: "start", value: start(3) } };
    await first;
    yield { message: { case: "userTurn", value: { content: [{ part: { case: "text", value: "And?" } }] } } };
  }
  const finished = [];
  for await (const response of client.chat(say())) {
    if (response.finished) finished.push(response.turn);
    if (response.finished) answered();
  }
  return finished;
}

async function byGrpcWeb(format) {
  const { GrpcWebClientBase, MethodDescriptor, MethodType } = grpcWeb;
  const client = new GrpcWebClientBase({ format });
  const method = (name, type, input, output) =>
    new MethodDescriptor(
      `/millstream.v1.ProcessorService/${name}`, type, Object, Object,
      (request) => toBinary(input, create(input, request)), (bytes) => fromBinary(output, bytes),
    );
  const tokenize = method("Tokenize", MethodType.UNARY, contract.TokenizeRequestSchema, contract.TokenizeResponseSchema);
  const chatOnce = method("ChatOnce", MethodType.SERVER_STREAMING, contract.ChatOnceRequestSchema, contract.ChatOnceResponseSchema);
  const url = (descriptor) => baseUrl + descriptor.getName();
  const call = (descriptor, request) =>
    new Promise((resolve, reject) =>
      client.rpcCall(url(descriptor), request, {}, descriptor, (error, response) => (error ? reject(error) : resolve(response))),
    );
  const got = {};
  const request = { model, input: { case: "text", value: "Hello" } };
  got.unary = (await call(tokenize, request)).tokenIds.length;
  const stream = (count, metadata, act) =>
    new Promise((resolve) => {
      const pieces = [];
      const streaming = client.serverStreaming(url(chatOnce), { start: start(count) }, metadata, chatOnce);
      streaming.on("data", (response) => {
        pieces.push(textOf(response));
        if (act) act(streaming, resolve);
      });
      streaming.on("error", (error) => resolve({ code: error.code, message: error.message }));
      streaming.on("end", () => resolve({ text: pieces.join("") }));
    });
  // In text only: the library takes the binary form whole, for unary calls.
  if (format === "text") {
    got.stream = await stream(5, {});
    got.cancel = await stream(4000, {}, (call, resolve) => (call.cancel(), resolve("cancelled")));
    got.deadline = await stream(4000, { deadline: String(Date.now() + 300) });
  }
  try {
    await call(tokenize, { model });
  } catch (error) {
    got.error = { code: error.code, message: error.message, details: "grpc-status-details-bin" in error.metadata };
  }
  return got;
}

const { createConnectTransport: connect, createGrpcWebTransport: grpcweb } = node;
const got = {
  connectNode1: await byConnect(connect({ baseUrl, httpVersion: "1.1" })),
  connectNode2: await byConnect(connect({ baseUrl, httpVersion: "2", useBinaryFormat: true }), true),
  connectNode2Json: await byConnect(connect({ baseUrl, httpVersion: "2", useBinaryFormat: false }), true),
  grpcWebNode1: await byConnect(grpcweb({ baseUrl, httpVersion: "1.1" })),
  grpcWebNode2Json: await byConnect(grpcweb({ baseUrl, httpVersion: "2", useBinaryFormat: false })),
  grpcNode: await byConnect(node.createGrpcTransport({ baseUrl }), true),
  connectWeb: await byConnect(web.createConnectTransport({ baseUrl, useBinaryFormat: true })),
  connectWebJson: await byConnect(web.createConnectTransport({ baseUrl, useBinaryFormat: false })),
  grpcWebWeb: await byConnect(web.createGrpcWebTransport({ baseUrl })),
  grpcWebText: await byGrpcWeb("text"),
  grpcWebBinary: await byGrpcWeb("binary"),
};
const said = [];
const usage = await ask(baseUrl, "", "Hello", (text) => said.push(text));
got.page = { text: said.join("").length > 0, tokens: usage.completionTokens };
process.stdout.write(JSON.stringify(got), () => process.exit()); // some clients keep their connections
