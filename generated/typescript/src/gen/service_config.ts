// Made from services/millstream_client/service_config. DO NOT EDIT.
/** For several Processors: balancing, health and retries. */
export const recommendedServiceConfig =
  '{"loadBalancingConfig": [{"round_robin": {}}], "healthCheckConfig": {"serviceName": "accepting"}, "methodConfig": [{"name": [{"service": "millstream.v1.ProcessorService"}, {"service": "millstream.v1.DiffusionService"}, {"service": "millstream.v1.EmbeddingService"}], "waitForReady": true, "retryPolicy": {"maxAttempts": 5, "initialBackoff": "0.1s", "maxBackoff": "2s", "backoffMultiplier": 2, "retryableStatusCodes": ["UNAVAILABLE"]}}], "retryThrottling": {"maxTokens": 1000, "tokenRatio": 0.5}}';
/** For a single one: retries. */
export const oneServerServiceConfig =
  '{"methodConfig": [{"name": [{"service": "millstream.v1.ProcessorService"}, {"service": "millstream.v1.DiffusionService"}, {"service": "millstream.v1.EmbeddingService"}], "waitForReady": true, "retryPolicy": {"maxAttempts": 5, "initialBackoff": "0.1s", "maxBackoff": "2s", "backoffMultiplier": 2, "retryableStatusCodes": ["UNAVAILABLE"]}}], "retryThrottling": {"maxTokens": 1000, "tokenRatio": 0.5}}';
