/** The contract `millstream.v1`, and its errors decoded. */
export * from "./gen/index.millstream.v1.js";
export { failureOf } from "./failure.js";
export type { Failure, Violation } from "./failure.js";
export { oneServerServiceConfig, recommendedServiceConfig } from "./gen/service_config.js";
