import io.grpc.ManagedChannel;
import io.grpc.ManagedChannelBuilder;
import io.grpc.Metadata;
import io.grpc.stub.MetadataUtils;
import io.grpc.stub.StreamObserver;
import io.millstream.Failure;
import io.millstream.v1.ChatMessage;
import io.millstream.v1.ChatRequest;
import io.millstream.v1.ChatResponse;
import io.millstream.v1.ChatRole;
import io.millstream.v1.ChatStart;
import io.millstream.v1.ContentPart;
import io.millstream.v1.ProcessorServiceGrpc;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;

/** Asks one question and prints the answer as it comes; arguments: 127.0.0.1:50051 MODEL. */
public final class Ask implements StreamObserver<ChatResponse> {
  private final CountDownLatch ended = new CountDownLatch(1);
  private volatile boolean failed;

  public static void main(String[] arguments) throws InterruptedException {
    ManagedChannel channel =
        ManagedChannelBuilder.forTarget(arguments[0]).usePlaintext().build(); // without TLS
    Metadata headers = new Metadata();
    String key = System.getenv("MILLSTREAM_API_KEY");
    if (key != null) {
      headers.put(
          Metadata.Key.of("authorization", Metadata.ASCII_STRING_MARSHALLER), "Bearer " + key);
    }
    Ask ask = new Ask();
    StreamObserver<ChatRequest> requests =
        ProcessorServiceGrpc.newStub(channel)
            .withInterceptors(MetadataUtils.newAttachHeadersInterceptor(headers))
            .withDeadlineAfter(1, TimeUnit.MINUTES)
            .chat(ask);
    requests.onNext(question(arguments[1], "Hello"));
    requests.onCompleted(); // one question only
    ask.ended.await();
    channel.shutdownNow();
    System.exit(ask.failed ? 1 : 0);
  }

  private static ChatRequest question(String model, String text) {
    ChatStart.Builder start = ChatStart.newBuilder().setModel(model);
    start.addMessages(
        ChatMessage.newBuilder()
            .setRole(ChatRole.CHAT_ROLE_USER)
            .addContent(ContentPart.newBuilder().setText(text)));
    start.getOptionsBuilder().getSamplingBuilder().setMaxNewTokens(5);
    return ChatRequest.newBuilder().setStart(start).build();
  }

  @Override
  public void onNext(ChatResponse response) {
    response.getChoicesList().forEach(choice -> System.out.print(choice.getText()));
    if (response.hasFinished()) {
      System.out.printf(
          "%n%d tokens%n", response.getFinished().getUsage().getCompletionTokens());
    }
  }

  @Override
  public void onError(Throwable error) {
    Failure failure = Failure.of(error);
    System.err.println(
        failure == null
            ? error.toString()
            : failure.reason + ": " + failure.message + "; retry after " + failure.retryDelay);
    failed = true;
    ended.countDown();
  }

  @Override
  public void onCompleted() {
    ended.countDown();
  }
}
