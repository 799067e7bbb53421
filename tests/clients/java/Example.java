import com.google.gson.Gson;
import com.google.gson.GsonBuilder;
import io.grpc.ClientInterceptor;
import io.grpc.ManagedChannel;
import io.grpc.ManagedChannelBuilder;
import io.grpc.Metadata;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import io.grpc.health.v1.HealthCheckRequest;
import io.grpc.health.v1.HealthGrpc;
import io.grpc.stub.AbstractStub;
import io.grpc.stub.MetadataUtils;
import io.millstream.v1.CompleteRequest;
import io.millstream.v1.GenerationOptions;
import io.millstream.v1.ProcessorServiceGrpc;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.concurrent.TimeUnit;

/**
 * An example client: health, a chat with a cancel and a second turn, a deadline, errors with their
 * details. It reads its settings from the environment and prints a JSON object per line; the tests
 * run it. docs/clients/java.md explains it.
 */
final class Example {
  private static final Gson JSON =
      new GsonBuilder().serializeNulls().disableHtmlEscaping().create();
  private static final String MODEL = System.getenv("MILLSTREAM_MODEL");
  private static final int BALANCED_CALLS = Integer.parseInt(System.getenv("MILLSTREAM_CALLS"));

  private final ManagedChannel channel;
  private final ClientInterceptor headers;

  private Example(ManagedChannel channel) {
    this.channel = channel;
    this.headers = headers(System.getenv("MILLSTREAM_API_KEY"));
  }

  public static void main(String[] arguments) throws Exception {
    ManagedChannel channel =
        Channels.connect(
            System.getenv("MILLSTREAM_ADDRESSES"), System.getenv("MILLSTREAM_SERVICE_CONFIG"));
    try {
      Example example = new Example(channel);
      example.checkHealth();
      new Chat(example.within(ProcessorServiceGrpc.newStub(channel), 10_000), MODEL).run();
      example.missDeadline();
      example.fail();
      example.balance();
    } finally {
      channel.shutdownNow(); // or its threads keep the process alive for a while
      channel.awaitTermination(5, TimeUnit.SECONDS);
    }
  }

  static void print(Map<String, ?> event) {
    System.out.println(JSON.toJson(event));
    System.out.flush();
  }

  /** Every call's metadata; without a key where {@code key} is null. */
  private static ClientInterceptor headers(String key) {
    Metadata metadata = new Metadata();
    metadata.put(ascii("traceparent"), System.getenv("TRACEPARENT"));
    if (key != null) {
      metadata.put(ascii("authorization"), "Bearer " + key);
    }
    return MetadataUtils.newAttachHeadersInterceptor(metadata);
  }

  private static Metadata.Key<String> ascii(String name) {
    return Metadata.Key.of(name, Metadata.ASCII_STRING_MARSHALLER);
  }

  /** A stub for one call: its deadline begins now, so a stub that is kept would have none left. */
  private <S extends AbstractStub<S>> S within(S stub, long milliseconds) {
    return stub.withInterceptors(headers).withDeadlineAfter(milliseconds, TimeUnit.MILLISECONDS);
  }

  private void checkHealth() {
    HealthCheckRequest request =
        HealthCheckRequest.newBuilder().setService("millstream.v1.ProcessorService").build();
    HealthGrpc.HealthBlockingStub stub =
        within(HealthGrpc.newBlockingStub(channel), 10_000).withWaitForReady();
    print(event("health", "status", stub.check(request).getStatus().name()));
  }

  private void missDeadline() {
    Status status = Status.OK;
    try {
      complete(within(ProcessorServiceGrpc.newBlockingStub(channel), 500), MODEL, tokens(400));
    } catch (StatusRuntimeException error) {
      status = error.getStatus();
    }
    print(event("ended", "call", "deadline", "code", status.getCode().name()));
  }

  private void fail() {
    GenerationOptions.Builder invalid = tokens(5).toBuilder();
    invalid.getSamplingBuilder().setTopP(2);
    ProcessorServiceGrpc.ProcessorServiceBlockingStub stub =
        ProcessorServiceGrpc.newBlockingStub(channel);
    printFailure("invalid", within(stub, 10_000), MODEL, invalid.build());
    printFailure("no_key", stub.withInterceptors(headers(null)), MODEL, tokens(5));
    failAtOnce();
  }

  /**
   * With a retry policy grpc-java sends again whatever the server names a delay for, whether or not
   * the policy has the code: RESOURCE_EXHAUSTED too, up to four times. This channel doesn't.
   */
  private void failAtOnce() {
    String address = System.getenv("MILLSTREAM_ADDRESSES").split(",")[0];
    ManagedChannel plain =
        ManagedChannelBuilder.forTarget(address).usePlaintext().disableRetry().build();
    try {
      printFailure(
          "overloaded",
          within(ProcessorServiceGrpc.newBlockingStub(plain), 10_000),
          System.getenv("MILLSTREAM_FULL_MODEL"),
          tokens(5));
    } finally {
      plain.shutdownNow();
    }
  }

  private static void printFailure(
      String call,
      ProcessorServiceGrpc.ProcessorServiceBlockingStub stub,
      String model,
      GenerationOptions options) {
    try {
      complete(stub, model, options);
      throw new IllegalStateException(call + " didn't fail");
    } catch (StatusRuntimeException error) {
      print(Failures.of(call, error));
    }
  }

  private void balance() {
    ProcessorServiceGrpc.ProcessorServiceBlockingStub stub =
        ProcessorServiceGrpc.newBlockingStub(channel);
    for (int i = 0; i < BALANCED_CALLS; i++) {
      complete(within(stub, 10_000), MODEL, tokens(1));
    }
    print(event("balanced", "calls", BALANCED_CALLS));
  }

  private static void complete(
      ProcessorServiceGrpc.ProcessorServiceBlockingStub stub,
      String model,
      GenerationOptions options) {
    CompleteRequest request =
        CompleteRequest.newBuilder().setModel(model).setText("Hello").setOptions(options).build();
    stub.complete(request).forEachRemaining(response -> {}); // hasNext() throws what went wrong
  }

  static GenerationOptions tokens(int most) {
    GenerationOptions.Builder options = GenerationOptions.newBuilder();
    options.getSamplingBuilder().setMaxNewTokens(most);
    return options.build();
  }

  static Map<String, Object> event(String name, Object... pairs) {
    Map<String, Object> event = new LinkedHashMap<>();
    event.put("event", name);
    for (int i = 0; i < pairs.length; i += 2) {
      event.put((String) pairs[i], pairs[i + 1]);
    }
    return event;
  }
}
