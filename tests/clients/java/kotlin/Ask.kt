import io.grpc.ManagedChannelBuilder
import io.grpc.Metadata
import io.grpc.stub.MetadataUtils
import io.grpc.stub.StreamObserver
import io.millstream.Failure
import io.millstream.v1.CancelTurn
import io.millstream.v1.ChatMessage
import io.millstream.v1.ChatRequest
import io.millstream.v1.ChatResponse
import io.millstream.v1.ChatRole
import io.millstream.v1.ChatStart
import io.millstream.v1.ContentPart
import io.millstream.v1.ProcessorServiceGrpc
import java.util.concurrent.CompletableFuture
import java.util.concurrent.TimeUnit
import kotlin.system.exitProcess
import sun.misc.Signal

/** Asks one question and prints the answer as it comes; Ctrl-C ends it. Arguments: 127.0.0.1:50051 MODEL [TOKENS] */
fun main(arguments: Array<String>) {
  val channel = ManagedChannelBuilder.forTarget(arguments[0]).usePlaintext().build() // without TLS
  val headers = Metadata()
  System.getenv("MILLSTREAM_API_KEY")?.let {
    headers.put(Metadata.Key.of("authorization", Metadata.ASCII_STRING_MARSHALLER), "Bearer $it")
  }
  val failed = CompletableFuture<Boolean>()
  lateinit var requests: StreamObserver<ChatRequest>
  val responses = object : StreamObserver<ChatResponse> {
    override fun onNext(response: ChatResponse) {
      response.choicesList.forEach { print(it.text) }
      if (response.hasFinished()) {
        println("\n${response.finished.usage.completionTokens} tokens")
        requests.onCompleted() // or ask again, with `setUserTurn`
      }
    }

    override fun onError(error: Throwable) {
      val failure = Failure.of(error) // null for what the library says itself: a deadline, a lost connection
      System.err.println(failure?.run { "$reason: $message; retry after $retryDelay" } ?: error)
      failed.complete(true)
    }

    override fun onCompleted() {
      failed.complete(false)
    }
  }
  requests = ProcessorServiceGrpc.newStub(channel)
    .withInterceptors(MetadataUtils.newAttachHeadersInterceptor(headers))
    .withDeadlineAfter(1, TimeUnit.MINUTES)
    .chat(responses)
  val start = ChatStart.newBuilder().setModel(arguments[1])
  val hello = ContentPart.newBuilder().setText("Hello")
  start.addMessages(ChatMessage.newBuilder().setRole(ChatRole.CHAT_ROLE_USER).addContent(hello))
  start.optionsBuilder.samplingBuilder.maxNewTokens = arguments.getOrNull(2)?.toInt() ?: 5
  requests.onNext(ChatRequest.newBuilder().setStart(start).build())
  // A message ends the turn and keeps the conversation; ClientCallStreamObserver.cancel ends the call.
  Signal.handle(Signal("INT")) {
    requests.onNext(ChatRequest.newBuilder().setCancel(CancelTurn.newBuilder().setTurn(1)).build())
  }
  val code = if (failed.get()) 1 else 0
  channel.shutdownNow()
  exitProcess(code)
}
