import com.google.protobuf.Any;
import com.google.protobuf.Duration;
import com.google.protobuf.InvalidProtocolBufferException;
import com.google.rpc.BadRequest;
import com.google.rpc.ErrorInfo;
import com.google.rpc.RetryInfo;
import io.grpc.StatusRuntimeException;
import io.grpc.protobuf.StatusProto;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;

/** Decodes the details that the server put into grpc-status-details-bin. */
final class Failure {
  private Failure() {}

  /** A failure of gRPC itself, such as a lost connection, has no details. */
  static Map<String, Object> of(String call, StatusRuntimeException error) {
    Map<String, Object> event =
        Example.event(
            "error",
            "call", call,
            "code", error.getStatus().getCode().name(),
            "message", error.getStatus().getDescription(),
            "reason", "",
            "domain", "",
            "retryable", false,
            "violations", new ArrayList<>(),
            "retry_delay_s", null);
    com.google.rpc.Status status = StatusProto.fromThrowable(error);
    try {
      for (Any detail : status == null ? List.<Any>of() : status.getDetailsList()) {
        add(event, detail);
      }
    } catch (InvalidProtocolBufferException invalid) {
      throw new IllegalStateException("the server's details don't parse", invalid);
    }
    return event;
  }

  private static void add(Map<String, Object> event, Any detail)
      throws InvalidProtocolBufferException {
    if (detail.is(ErrorInfo.class)) {
      ErrorInfo info = detail.unpack(ErrorInfo.class);
      event.put("reason", info.getReason());
      event.put("domain", info.getDomain());
      event.put("retryable", "true".equals(info.getMetadataOrDefault("retryable", "")));
    } else if (detail.is(BadRequest.class)) {
      List<Map<String, String>> violations = new ArrayList<>();
      for (BadRequest.FieldViolation violation :
          detail.unpack(BadRequest.class).getFieldViolationsList()) {
        violations.add(
            Map.of("field", violation.getField(), "description", violation.getDescription()));
      }
      event.put("violations", violations);
    } else if (detail.is(RetryInfo.class)) {
      Duration delay = detail.unpack(RetryInfo.class).getRetryDelay();
      event.put("retry_delay_s", delay.getSeconds() + delay.getNanos() / 1e9);
    }
  }
}
