import com.google.rpc.BadRequest;
import io.grpc.StatusRuntimeException;
import io.millstream.Failure;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;

/** Prints the details that the server put into grpc-status-details-bin. */
final class Failures {
  private Failures() {}

  static Map<String, Object> of(String call, StatusRuntimeException error) {
    Failure failure = Failure.of(error);
    if (failure == null) { // a failure of gRPC itself, such as a lost connection
      return Example.event("error", "call", call, "code", error.getStatus().getCode().name());
    }
    List<Map<String, String>> violations = new ArrayList<>();
    for (BadRequest.FieldViolation one : failure.violations) {
      violations.add(Map.of("field", one.getField(), "description", one.getDescription()));
    }
    return Example.event(
        "error",
        "call", call,
        "code", failure.code.name(),
        "message", failure.message,
        "reason", failure.reason,
        "domain", failure.domain,
        "retryable", failure.retryable,
        "violations", violations,
        "retry_delay_s",
        failure.retryDelay == null ? null : failure.retryDelay.toMillis() / 1e3);
  }
}
