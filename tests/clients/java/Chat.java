import io.grpc.Status;
import io.grpc.stub.StreamObserver;
import io.millstream.v1.CancelTurn;
import io.millstream.v1.ChatMessage;
import io.millstream.v1.ChatRequest;
import io.millstream.v1.ChatResponse;
import io.millstream.v1.ChatRole;
import io.millstream.v1.ChatStart;
import io.millstream.v1.ChoiceDelta;
import io.millstream.v1.ContentPart;
import io.millstream.v1.FinishReason;
import io.millstream.v1.ProcessorServiceGrpc.ProcessorServiceStub;
import io.millstream.v1.UserTurn;
import java.util.concurrent.CompletableFuture;

/**
 * Two turns on one stream. The first is cancelled by a message, which ends the turn and keeps the
 * conversation. gRPC calls the methods of a response observer one at a time, so what is sent from
 * there needs no lock.
 */
final class Chat implements StreamObserver<ChatResponse> {
  private static final int CANCEL_AFTER = 3;

  private final ProcessorServiceStub stub;
  private final String model;
  private final CompletableFuture<Void> ended = new CompletableFuture<>();
  private StreamObserver<ChatRequest> requests;
  private int deltas;

  Chat(ProcessorServiceStub stub, String model) {
    this.stub = stub;
    this.model = model;
  }

  /** Chats, and returns when the stream has ended; the stub's deadline bounds that. */
  void run() throws Exception {
    requests = stub.chat(this);
    ChatStart.Builder start = ChatStart.newBuilder().setModel(model);
    start.addMessages(
        ChatMessage.newBuilder()
            .setRole(ChatRole.CHAT_ROLE_USER)
            .addContent(text("Say the alphabet.")));
    start.setOptions(Example.tokens(400));
    requests.onNext(ChatRequest.newBuilder().setStart(start).build());
    ended.get();
  }

  private static ContentPart text(String text) {
    return ContentPart.newBuilder().setText(text).build();
  }

  @Override
  public void onNext(ChatResponse response) {
    StringBuilder text = new StringBuilder();
    for (ChoiceDelta choice : response.getChoicesList()) {
      text.append(choice.getText());
    }
    if (text.length() > 0) {
      Example.print(
          Example.event("delta", "turn", response.getTurn(), "text", text.toString()));
      if (++deltas == CANCEL_AFTER) {
        requests.onNext(cancel(response.getTurn()));
      }
    }
    if (response.hasFinished()) {
      finish(response);
    }
  }

  /** Names the turn, so that a cancel that comes too late doesn't stop the next one. */
  private static ChatRequest cancel(int turn) {
    return ChatRequest.newBuilder().setCancel(CancelTurn.newBuilder().setTurn(turn)).build();
  }

  private void finish(ChatResponse response) {
    FinishReason reason = FinishReason.FINISH_REASON_UNSPECIFIED;
    for (ChoiceDelta choice : response.getChoicesList()) {
      reason = choice.getFinishReason(); // there is one choice; its last delta says why it ended
    }
    Example.print(
        Example.event(
            "finished",
            "turn", response.getTurn(),
            "finish_reason", reason.name(),
            "completion_tokens", response.getFinished().getUsage().getCompletionTokens()));
    if (response.getTurn() == 1) {
      UserTurn.Builder turn = UserTurn.newBuilder().addContent(text("Again, the beginning only."));
      turn.setOptions(Example.tokens(5));
      requests.onNext(ChatRequest.newBuilder().setUserTurn(turn).build());
    } else {
      requests.onCompleted(); // the server ends the stream
    }
  }

  @Override
  public void onError(Throwable error) {
    ended.completeExceptionally(error);
  }

  @Override
  public void onCompleted() {
    Example.print(
        Example.event("ended", "call", "chat", "code", Status.Code.OK.name()));
    ended.complete(null);
  }
}
