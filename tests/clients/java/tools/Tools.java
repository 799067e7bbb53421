import com.google.gson.JsonObject;
import com.google.gson.JsonParser;
import io.grpc.ManagedChannel;
import io.grpc.ManagedChannelBuilder;
import io.grpc.stub.StreamObserver;
import io.millstream.v1.ChatMessage;
import io.millstream.v1.ChatOutput;
import io.millstream.v1.ChatRequest;
import io.millstream.v1.ChatResponse;
import io.millstream.v1.ChatRole;
import io.millstream.v1.ChatStart;
import io.millstream.v1.ChatTool;
import io.millstream.v1.ChoiceDelta;
import io.millstream.v1.ContentPart;
import io.millstream.v1.FinishReason;
import io.millstream.v1.OutputEvent;
import io.millstream.v1.ProcessorServiceGrpc;
import io.millstream.v1.ToolCall;
import io.millstream.v1.ToolResults;
import java.time.LocalTime;
import java.time.format.DateTimeFormatter;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.TimeUnit;

/** Lets the model call a clock and a calculator; arguments: 127.0.0.1:50051 "What is 17 times 23?". */
public final class Tools implements StreamObserver<ChatResponse> {
  private static final int MOST_ROUNDS = 8;

  private final CompletableFuture<Void> ended = new CompletableFuture<>();
  private final List<ToolCall> calls = new ArrayList<>();
  private StreamObserver<ChatRequest> requests;
  private int rounds;

  public static void main(String[] args) throws Exception {
    ManagedChannel channel = ManagedChannelBuilder.forTarget(args[0]).usePlaintext().build();
    try {
      Tools tools = new Tools();
      tools.requests =
          ProcessorServiceGrpc.newStub(channel).withDeadlineAfter(60, TimeUnit.SECONDS).chat(tools);
      tools.requests.onNext(start(args[1]));
      tools.ended.get();
    } finally {
      channel.shutdownNow();
    }
  }

  private static ChatRequest start(String question) {
    String schema =
        "{\"type\": \"object\", \"properties\": {\"expression\": {\"type\": \"string\"}},"
            + " \"required\": [\"expression\"]}";
    ChatTool clock = ChatTool.newBuilder().setName("clock").setDescription("Tell the time.").build();
    ChatTool calculate =
        ChatTool.newBuilder()
            .setName("calculate")
            .setDescription("Work out an expression, such as 6 * 7.")
            .setParametersJsonSchema(schema)
            .build();
    ChatStart start =
        ChatStart.newBuilder()
            .addMessages(message(ChatRole.CHAT_ROLE_USER, question))
            .addTools(clock)
            .addTools(calculate)
            .setOutput(ChatOutput.CHAT_OUTPUT_EVENTS)
            .build();
    return ChatRequest.newBuilder().setStart(start).build();
  }

  @Override
  public void onNext(ChatResponse response) {
    for (ChoiceDelta choice : response.getChoicesList()) {
      for (OutputEvent event : choice.getEventsList()) {
        System.out.print(event.getText()); // "" for reasoning and calls
      }
      // Whole, in the last delta. With another finish reason there may be some that were cut.
      if (choice.getFinishReason() == FinishReason.FINISH_REASON_TOOL_CALLS) {
        calls.addAll(choice.getToolCallsList());
      }
    }
    if (response.hasFinished()) {
      System.out.println();
      goOn();
    }
  }

  /** Sends the results of the calls, or ends the conversation. */
  private void goOn() {
    if (calls.isEmpty()) {
      requests.onCompleted();
      return;
    }
    if (++rounds > MOST_ROUNDS) {
      throw new IllegalStateException("the model still calls tools after " + MOST_ROUNDS + " rounds");
    }
    ToolResults.Builder results = ToolResults.newBuilder();
    for (ToolCall call : calls) {
      if (!call.getIncomplete()) { // that isn't part of the conversation
        String result = run(call.getName(), call.getArgumentsJson());
        ChatMessage.Builder message = message(ChatRole.CHAT_ROLE_TOOL, result).toBuilder();
        results.addMessages(message.setToolCallId(call.getId()));
      }
    }
    calls.clear();
    requests.onNext(ChatRequest.newBuilder().setToolResults(results).build());
  }

  /** Returns what the model gets: a result, or a sentence that says what is wrong. */
  private static String run(String name, String argumentsJson) {
    if (name.equals("clock")) {
      return LocalTime.now().format(DateTimeFormatter.ofPattern("HH:mm"));
    }
    if (!name.equals("calculate")) {
      return "error: there is no tool " + name;
    }
    try {
      JsonObject arguments = JsonParser.parseString(argumentsJson).getAsJsonObject();
      String[] parts = arguments.get("expression").getAsString().split(" ");
      double left = Double.parseDouble(parts[0]);
      double right = Double.parseDouble(parts[2]);
      switch (parts[1]) {
        case "+":
          return number(left + right);
        case "-":
          return number(left - right);
        case "*":
          return number(left * right);
        case "/":
          return number(left / right);
        default:
          return "error: there is no sign " + parts[1];
      }
    } catch (RuntimeException e) {
      return "error: write two numbers and a sign between them";
    }
  }

  private static String number(double value) {
    return value == Math.rint(value) ? String.valueOf((long) value) : String.valueOf(value);
  }

  private static ChatMessage message(ChatRole role, String text) {
    ContentPart part = ContentPart.newBuilder().setText(text).build();
    return ChatMessage.newBuilder().setRole(role).addContent(part).build();
  }

  @Override
  public void onError(Throwable error) {
    ended.completeExceptionally(error);
  }

  @Override
  public void onCompleted() {
    ended.complete(null);
  }
}
