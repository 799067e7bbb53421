package io.millstream;

import com.google.protobuf.Any;
import com.google.protobuf.InvalidProtocolBufferException;
import com.google.rpc.BadRequest;
import com.google.rpc.ErrorInfo;
import com.google.rpc.RetryInfo;
import io.grpc.Status;
import io.grpc.protobuf.StatusProto;
import java.time.Duration;
import java.util.Collections;
import java.util.List;

/** Why an RPC failed, in full: what the trailer {@code grpc-status-details-bin} carries. */
public final class Failure {
  /** The gRPC status code. */
  public final Status.Code code;

  /** A sentence for the caller's developer. */
  public final String message;

  /** The stable cause: a name of {@code ErrorReason}, such as OVERLOADED; empty without ErrorInfo. */
  public final String reason;

  /** {@code millstream.io}, if a service of Millstream says it. */
  public final String domain;

  /** Whether the same request may succeed when it is sent again. */
  public final boolean retryable;

  /** Finds the server's log line, when the code is INTERNAL. */
  public final String errorId;

  /** Every invalid field that was found: its path from the request's root, and what is wrong. */
  public final List<BadRequest.FieldViolation> violations;

  /** Least time to wait before it is sent again; null if the server names none. */
  public final Duration retryDelay;

  private Failure(com.google.rpc.Status status) throws InvalidProtocolBufferException {
    ErrorInfo info = ErrorInfo.getDefaultInstance();
    List<BadRequest.FieldViolation> invalid = Collections.emptyList();
    Duration delay = null;
    for (Any detail : status.getDetailsList()) {
      if (detail.is(ErrorInfo.class)) {
        info = detail.unpack(ErrorInfo.class);
      } else if (detail.is(BadRequest.class)) {
        invalid = detail.unpack(BadRequest.class).getFieldViolationsList();
      } else if (detail.is(RetryInfo.class)) {
        com.google.protobuf.Duration wait = detail.unpack(RetryInfo.class).getRetryDelay();
        delay = Duration.ofSeconds(wait.getSeconds(), wait.getNanos());
      }
    }
    code = Status.fromCodeValue(status.getCode()).getCode();
    message = status.getMessage();
    reason = info.getReason();
    domain = info.getDomain();
    retryable = "true".equals(info.getMetadataOrDefault("retryable", ""));
    errorId = info.getMetadataOrDefault("error_id", "");
    violations = invalid;
    retryDelay = delay;
  }

  /**
   * Decodes the error that a call ended with. Returns null when it carries no details, because the
   * library made it (a lost connection, a deadline) or it isn't an RPC's.
   */
  public static Failure of(Throwable error) {
    com.google.rpc.Status status = StatusProto.fromThrowable(error);
    if (status == null || status.getDetailsCount() == 0) {
      return null;
    }
    try {
      return new Failure(status);
    } catch (InvalidProtocolBufferException invalid) {
      return null; // not what a server of Millstream sends
    }
  }
}
