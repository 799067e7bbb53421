import type { Metadata } from "@grpc/grpc-js";
import type { Any } from "./gen/google/protobuf/any.js";
import { BadRequest, ErrorInfo, RetryInfo } from "./gen/google/rpc/error_details.js";
import { Status } from "./gen/google/rpc/status.js";

/** An invalid field of a request. */
export interface Violation {
  /** Path from the request's root: `options.sampling.top_p`. */
  field: string;
  /** What is wrong with it, and what is allowed. */
  description: string;
}

/** Why an RPC failed, in full: what the trailer `grpc-status-details-bin` carries. */
export interface Failure {
  /** The gRPC status code. */
  code: number;
  /** A sentence for the caller's developer. */
  message: string;
  /** The stable cause: a name of `ErrorReason`, such as `OVERLOADED`; empty without ErrorInfo. */
  reason: string;
  /** `millstream.io`, if a service of Millstream says it. */
  domain: string;
  /** Whether the same request may succeed when it is sent again. */
  retryable: boolean;
  /** Finds the server's log line, when the code is INTERNAL. */
  errorId: string;
  /** Every invalid field that was found. */
  violations: Violation[];
  /** Least time to wait before it is sent again, in milliseconds. */
  retryDelayMs: number | undefined;
}

/**
 * Decode the details of an error that a call ended with; undefined when it carries none, because
 * the library made it (a lost connection, a deadline) or because it isn't an RPC's error.
 */
export function failureOf(error: unknown): Failure | undefined {
  const metadata = (error as { metadata?: Metadata } | undefined)?.metadata;
  const [bytes] = metadata?.get("grpc-status-details-bin") ?? [];
  if (!(bytes instanceof Uint8Array)) return undefined;
  const status = Status.decode(bytes);
  const info = found(status.details, ErrorInfo);
  const delay = found(status.details, RetryInfo)?.retryDelay;
  return {
    code: status.code,
    message: status.message,
    reason: info?.reason ?? "",
    domain: info?.domain ?? "",
    retryable: info?.metadata["retryable"] === "true",
    errorId: info?.metadata["error_id"] ?? "",
    violations: (found(status.details, BadRequest)?.fieldViolations ?? []).map(
      ({ field, description }) => ({ field, description }),
    ),
    retryDelayMs: delay && Number(delay.seconds) * 1000 + delay.nanos / 1e6,
  };
}

interface Codec<T> {
  readonly $type: string;
  decode(input: Uint8Array): T;
}

function found<T>(details: Any[], type: Codec<T>): T | undefined {
  const detail = details.find(({ typeUrl }) => typeUrl.endsWith(`/${type.$type}`));
  return detail && type.decode(detail.value);
}
