import com.google.gson.Gson;
import io.grpc.Attributes;
import io.grpc.EquivalentAddressGroup;
import io.grpc.ManagedChannel;
import io.grpc.ManagedChannelBuilder;
import io.grpc.NameResolver;
import io.grpc.NameResolverProvider;
import io.grpc.NameResolverRegistry;
import java.io.IOException;
import java.net.InetSocketAddress;
import java.net.URI;
import java.nio.file.Files;
import java.nio.file.Paths;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;

/**
 * One channel over several servers. With a headless service the target is {@code
 * dns:///NAME:50051}, and this class is one line. The service config's numbers must be doubles, as
 * Gson makes them.
 */
final class Channels extends NameResolverProvider {
  private final List<EquivalentAddressGroup> servers = new ArrayList<>();

  private Channels(String addresses) {
    for (String address : addresses.split(",")) {
      int colon = address.lastIndexOf(':');
      int port = Integer.parseInt(address.substring(colon + 1));
      servers.add(
          new EquivalentAddressGroup(new InetSocketAddress(address.substring(0, colon), port)));
    }
  }

  static ManagedChannel connect(String addresses, String serviceConfigPath) throws IOException {
    @SuppressWarnings("unchecked")
    Map<String, ?> serviceConfig =
        new Gson().fromJson(Files.readString(Paths.get(serviceConfigPath)), Map.class);
    NameResolverRegistry.getDefaultRegistry().register(new Channels(addresses));
    return ManagedChannelBuilder.forTarget("list:///processors")
        .usePlaintext()
        .enableRetry()
        .defaultServiceConfig(serviceConfig)
        .build();
  }

  @Override
  public NameResolver newNameResolver(URI target, NameResolver.Args arguments) {
    return new NameResolver() {
      @Override
      public String getServiceAuthority() {
        return "processors";
      }

      @Override
      public void start(Listener2 listener) {
        listener.onResult(
            ResolutionResult.newBuilder()
                .setAddresses(servers)
                .setAttributes(Attributes.EMPTY)
                .build());
      }

      @Override
      public void shutdown() {}
    };
  }

  @Override
  public String getDefaultScheme() {
    return "list";
  }

  @Override
  protected boolean isAvailable() {
    return true;
  }

  @Override
  protected int priority() {
    return 5;
  }
}
