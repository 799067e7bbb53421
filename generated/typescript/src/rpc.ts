/** The messages that errors carry, `google.rpc`, and the well-known types that the contract uses. */
export * from "./gen/index.google.rpc.js";
export * from "./gen/index.google.protobuf.js";
