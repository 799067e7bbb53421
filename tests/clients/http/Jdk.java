// The JDK's HttpClient with its defaults, as LangChain4j and Spring AI use it: it offers h2c with
// its first request on each connection. Prints a JSON array of what it was answered.

import java.io.ByteArrayInputStream;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpRequest.BodyPublisher;
import java.net.http.HttpRequest.BodyPublishers;
import java.net.http.HttpResponse;
import java.net.http.HttpResponse.BodyHandlers;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.List;
import java.util.stream.Collectors;

public final class Jdk {
  private static final String BODY =
      "{\"model\": \"tiny\", \"messages\": [{\"role\": \"user\", \"content\": \"hi\"}]%s}";

  public static void main(String[] arguments) throws Exception {
    String base = "http://" + arguments[0];
    String whole = String.format(BODY, "");
    String streamed = String.format(BODY, ", \"stream\": true");
    byte[] bytes = whole.getBytes(StandardCharsets.UTF_8);
    List<String> said = new ArrayList<>();
    // A client each: one that has a connection of HTTP/1.1 offers nothing more.
    said.add(post(base + "/v1/chat/completions", BodyPublishers.ofString(whole)));
    said.add(
        post(
            base + "/v1/chat/completions",
            BodyPublishers.ofInputStream(() -> new ByteArrayInputStream(bytes))));
    said.add(post(base + "/tokenize", BodyPublishers.ofString("{\"prompt\": \"hi\"}")));
    said.add(post(base + "/millstream.v1.ProcessorService/ListModels", BodyPublishers.ofString("{}")));
    HttpClient client = HttpClient.newHttpClient();
    HttpRequest events = request(base + "/v1/chat/completions", BodyPublishers.ofString(streamed));
    for (int i = 0; i < 3; i++) {
      String lines =
          client.send(events, BodyHandlers.ofLines()).body().collect(Collectors.joining("\n"));
      said.add(quoted(lines));
    }
    HttpRequest models = HttpRequest.newBuilder(URI.create(base + "/v1/models")).build();
    said.add(client.send(models, BodyHandlers.ofString()).body());
    System.out.println("[" + String.join(",", said) + "]");
  }

  private static String post(String url, BodyPublisher body) throws Exception {
    HttpResponse<String> response =
        HttpClient.newHttpClient().send(request(url, body), BodyHandlers.ofString());
    return response.body();
  }

  private static HttpRequest request(String url, BodyPublisher body) {
    return HttpRequest.newBuilder(URI.create(url))
        .header("content-type", "application/json")
        .POST(body)
        .build();
  }

  private static String quoted(String text) {
    return '"' + text.replace("\\", "\\\\").replace("\"", "\\\"").replace("\n", "\\n") + '"';
  }
}
