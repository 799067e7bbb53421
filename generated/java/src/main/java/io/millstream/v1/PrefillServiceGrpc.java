package io.millstream.v1;

import static io.grpc.MethodDescriptor.generateFullMethodName;

/**
 * <pre>
 * PrefillService turns prompts into KV cache and hands it to decode workers.
 * </pre>
 */
@io.grpc.stub.annotations.GrpcGenerated
public final class PrefillServiceGrpc {

  private PrefillServiceGrpc() {}

  public static final String SERVICE_NAME = "millstream.v1.PrefillService";

  // Static method descriptors that strictly reflect the proto.
  private static volatile io.grpc.MethodDescriptor<io.millstream.v1.PrefillRequest,
      io.millstream.v1.PrefillResponse> getPrefillMethod;

  @io.grpc.stub.annotations.RpcMethod(
      fullMethodName = SERVICE_NAME + '/' + "Prefill",
      requestType = io.millstream.v1.PrefillRequest.class,
      responseType = io.millstream.v1.PrefillResponse.class,
      methodType = io.grpc.MethodDescriptor.MethodType.BIDI_STREAMING)
  public static io.grpc.MethodDescriptor<io.millstream.v1.PrefillRequest,
      io.millstream.v1.PrefillResponse> getPrefillMethod() {
    io.grpc.MethodDescriptor<io.millstream.v1.PrefillRequest, io.millstream.v1.PrefillResponse> getPrefillMethod;
    if ((getPrefillMethod = PrefillServiceGrpc.getPrefillMethod) == null) {
      synchronized (PrefillServiceGrpc.class) {
        if ((getPrefillMethod = PrefillServiceGrpc.getPrefillMethod) == null) {
          PrefillServiceGrpc.getPrefillMethod = getPrefillMethod =
              io.grpc.MethodDescriptor.<io.millstream.v1.PrefillRequest, io.millstream.v1.PrefillResponse>newBuilder()
              .setType(io.grpc.MethodDescriptor.MethodType.BIDI_STREAMING)
              .setFullMethodName(generateFullMethodName(SERVICE_NAME, "Prefill"))
              .setSampledToLocalTracing(true)
              .setRequestMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.millstream.v1.PrefillRequest.getDefaultInstance()))
              .setResponseMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.millstream.v1.PrefillResponse.getDefaultInstance()))
              .setSchemaDescriptor(new PrefillServiceMethodDescriptorSupplier("Prefill"))
              .build();
        }
      }
    }
    return getPrefillMethod;
  }

  /**
   * Creates a new async stub that supports all call types for the service
   */
  public static PrefillServiceStub newStub(io.grpc.Channel channel) {
    io.grpc.stub.AbstractStub.StubFactory<PrefillServiceStub> factory =
      new io.grpc.stub.AbstractStub.StubFactory<PrefillServiceStub>() {
        @java.lang.Override
        public PrefillServiceStub newStub(io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
          return new PrefillServiceStub(channel, callOptions);
        }
      };
    return PrefillServiceStub.newStub(factory, channel);
  }

  /**
   * Creates a new blocking-style stub that supports unary and streaming output calls on the service
   */
  public static PrefillServiceBlockingStub newBlockingStub(
      io.grpc.Channel channel) {
    io.grpc.stub.AbstractStub.StubFactory<PrefillServiceBlockingStub> factory =
      new io.grpc.stub.AbstractStub.StubFactory<PrefillServiceBlockingStub>() {
        @java.lang.Override
        public PrefillServiceBlockingStub newStub(io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
          return new PrefillServiceBlockingStub(channel, callOptions);
        }
      };
    return PrefillServiceBlockingStub.newStub(factory, channel);
  }

  /**
   * Creates a new ListenableFuture-style stub that supports unary calls on the service
   */
  public static PrefillServiceFutureStub newFutureStub(
      io.grpc.Channel channel) {
    io.grpc.stub.AbstractStub.StubFactory<PrefillServiceFutureStub> factory =
      new io.grpc.stub.AbstractStub.StubFactory<PrefillServiceFutureStub>() {
        @java.lang.Override
        public PrefillServiceFutureStub newStub(io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
          return new PrefillServiceFutureStub(channel, callOptions);
        }
      };
    return PrefillServiceFutureStub.newStub(factory, channel);
  }

  /**
   * <pre>
   * PrefillService turns prompts into KV cache and hands it to decode workers.
   * </pre>
   */
  public static abstract class PrefillServiceImplBase implements io.grpc.BindableService {

    /**
     * <pre>
     * Prefill carries any number of requests on one stream; generation.proto states the rules. Each
     * request needs a ticket; a decode worker runs its decode leg at the same time. No token is returned:
     * the slot ends with FINISH_REASON_LENGTH and usage (including cached_tokens) once the decode worker
     * has received the KV cache.
     * </pre>
     */
    public io.grpc.stub.StreamObserver<io.millstream.v1.PrefillRequest> prefill(
        io.grpc.stub.StreamObserver<io.millstream.v1.PrefillResponse> responseObserver) {
      return io.grpc.stub.ServerCalls.asyncUnimplementedStreamingCall(getPrefillMethod(), responseObserver);
    }

    @java.lang.Override public final io.grpc.ServerServiceDefinition bindService() {
      return io.grpc.ServerServiceDefinition.builder(getServiceDescriptor())
          .addMethod(
            getPrefillMethod(),
            io.grpc.stub.ServerCalls.asyncBidiStreamingCall(
              new MethodHandlers<
                io.millstream.v1.PrefillRequest,
                io.millstream.v1.PrefillResponse>(
                  this, METHODID_PREFILL)))
          .build();
    }
  }

  /**
   * <pre>
   * PrefillService turns prompts into KV cache and hands it to decode workers.
   * </pre>
   */
  public static final class PrefillServiceStub extends io.grpc.stub.AbstractAsyncStub<PrefillServiceStub> {
    private PrefillServiceStub(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      super(channel, callOptions);
    }

    @java.lang.Override
    protected PrefillServiceStub build(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      return new PrefillServiceStub(channel, callOptions);
    }

    /**
     * <pre>
     * Prefill carries any number of requests on one stream; generation.proto states the rules. Each
     * request needs a ticket; a decode worker runs its decode leg at the same time. No token is returned:
     * the slot ends with FINISH_REASON_LENGTH and usage (including cached_tokens) once the decode worker
     * has received the KV cache.
     * </pre>
     */
    public io.grpc.stub.StreamObserver<io.millstream.v1.PrefillRequest> prefill(
        io.grpc.stub.StreamObserver<io.millstream.v1.PrefillResponse> responseObserver) {
      return io.grpc.stub.ClientCalls.asyncBidiStreamingCall(
          getChannel().newCall(getPrefillMethod(), getCallOptions()), responseObserver);
    }
  }

  /**
   * <pre>
   * PrefillService turns prompts into KV cache and hands it to decode workers.
   * </pre>
   */
  public static final class PrefillServiceBlockingStub extends io.grpc.stub.AbstractBlockingStub<PrefillServiceBlockingStub> {
    private PrefillServiceBlockingStub(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      super(channel, callOptions);
    }

    @java.lang.Override
    protected PrefillServiceBlockingStub build(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      return new PrefillServiceBlockingStub(channel, callOptions);
    }
  }

  /**
   * <pre>
   * PrefillService turns prompts into KV cache and hands it to decode workers.
   * </pre>
   */
  public static final class PrefillServiceFutureStub extends io.grpc.stub.AbstractFutureStub<PrefillServiceFutureStub> {
    private PrefillServiceFutureStub(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      super(channel, callOptions);
    }

    @java.lang.Override
    protected PrefillServiceFutureStub build(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      return new PrefillServiceFutureStub(channel, callOptions);
    }
  }

  private static final int METHODID_PREFILL = 0;

  private static final class MethodHandlers<Req, Resp> implements
      io.grpc.stub.ServerCalls.UnaryMethod<Req, Resp>,
      io.grpc.stub.ServerCalls.ServerStreamingMethod<Req, Resp>,
      io.grpc.stub.ServerCalls.ClientStreamingMethod<Req, Resp>,
      io.grpc.stub.ServerCalls.BidiStreamingMethod<Req, Resp> {
    private final PrefillServiceImplBase serviceImpl;
    private final int methodId;

    MethodHandlers(PrefillServiceImplBase serviceImpl, int methodId) {
      this.serviceImpl = serviceImpl;
      this.methodId = methodId;
    }

    @java.lang.Override
    @java.lang.SuppressWarnings("unchecked")
    public void invoke(Req request, io.grpc.stub.StreamObserver<Resp> responseObserver) {
      switch (methodId) {
        default:
          throw new AssertionError();
      }
    }

    @java.lang.Override
    @java.lang.SuppressWarnings("unchecked")
    public io.grpc.stub.StreamObserver<Req> invoke(
        io.grpc.stub.StreamObserver<Resp> responseObserver) {
      switch (methodId) {
        case METHODID_PREFILL:
          return (io.grpc.stub.StreamObserver<Req>) serviceImpl.prefill(
              (io.grpc.stub.StreamObserver<io.millstream.v1.PrefillResponse>) responseObserver);
        default:
          throw new AssertionError();
      }
    }
  }

  private static abstract class PrefillServiceBaseDescriptorSupplier
      implements io.grpc.protobuf.ProtoFileDescriptorSupplier, io.grpc.protobuf.ProtoServiceDescriptorSupplier {
    PrefillServiceBaseDescriptorSupplier() {}

    @java.lang.Override
    public com.google.protobuf.Descriptors.FileDescriptor getFileDescriptor() {
      return io.millstream.v1.PrefillProto.getDescriptor();
    }

    @java.lang.Override
    public com.google.protobuf.Descriptors.ServiceDescriptor getServiceDescriptor() {
      return getFileDescriptor().findServiceByName("PrefillService");
    }
  }

  private static final class PrefillServiceFileDescriptorSupplier
      extends PrefillServiceBaseDescriptorSupplier {
    PrefillServiceFileDescriptorSupplier() {}
  }

  private static final class PrefillServiceMethodDescriptorSupplier
      extends PrefillServiceBaseDescriptorSupplier
      implements io.grpc.protobuf.ProtoMethodDescriptorSupplier {
    private final String methodName;

    PrefillServiceMethodDescriptorSupplier(String methodName) {
      this.methodName = methodName;
    }

    @java.lang.Override
    public com.google.protobuf.Descriptors.MethodDescriptor getMethodDescriptor() {
      return getServiceDescriptor().findMethodByName(methodName);
    }
  }

  private static volatile io.grpc.ServiceDescriptor serviceDescriptor;

  public static io.grpc.ServiceDescriptor getServiceDescriptor() {
    io.grpc.ServiceDescriptor result = serviceDescriptor;
    if (result == null) {
      synchronized (PrefillServiceGrpc.class) {
        result = serviceDescriptor;
        if (result == null) {
          serviceDescriptor = result = io.grpc.ServiceDescriptor.newBuilder(SERVICE_NAME)
              .setSchemaDescriptor(new PrefillServiceFileDescriptorSupplier())
              .addMethod(getPrefillMethod())
              .build();
        }
      }
    }
    return result;
  }
}
