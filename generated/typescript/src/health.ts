/** The standard health protocol, `grpc.health.v1`. */
export * from "./gen/index.grpc.health.v1.js";
