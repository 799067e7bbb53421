package io.millstream.v1;

import static io.grpc.MethodDescriptor.generateFullMethodName;

/**
 * <pre>
 * EmbeddingService turns texts into vectors, and ranks documents. EMBEDDING workers serve it, and the
 * Processor, which tokenizes and forwards to them: the same messages at both, but workers take token
 * ids only.
 * </pre>
 */
@io.grpc.stub.annotations.GrpcGenerated
public final class EmbeddingServiceGrpc {

  private EmbeddingServiceGrpc() {}

  public static final String SERVICE_NAME = "millstream.v1.EmbeddingService";

  // Static method descriptors that strictly reflect the proto.
  private static volatile io.grpc.MethodDescriptor<io.millstream.v1.EmbedRequest,
      io.millstream.v1.EmbedResponse> getEmbedMethod;

  @io.grpc.stub.annotations.RpcMethod(
      fullMethodName = SERVICE_NAME + '/' + "Embed",
      requestType = io.millstream.v1.EmbedRequest.class,
      responseType = io.millstream.v1.EmbedResponse.class,
      methodType = io.grpc.MethodDescriptor.MethodType.BIDI_STREAMING)
  public static io.grpc.MethodDescriptor<io.millstream.v1.EmbedRequest,
      io.millstream.v1.EmbedResponse> getEmbedMethod() {
    io.grpc.MethodDescriptor<io.millstream.v1.EmbedRequest, io.millstream.v1.EmbedResponse> getEmbedMethod;
    if ((getEmbedMethod = EmbeddingServiceGrpc.getEmbedMethod) == null) {
      synchronized (EmbeddingServiceGrpc.class) {
        if ((getEmbedMethod = EmbeddingServiceGrpc.getEmbedMethod) == null) {
          EmbeddingServiceGrpc.getEmbedMethod = getEmbedMethod =
              io.grpc.MethodDescriptor.<io.millstream.v1.EmbedRequest, io.millstream.v1.EmbedResponse>newBuilder()
              .setType(io.grpc.MethodDescriptor.MethodType.BIDI_STREAMING)
              .setFullMethodName(generateFullMethodName(SERVICE_NAME, "Embed"))
              .setSampledToLocalTracing(true)
              .setRequestMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.millstream.v1.EmbedRequest.getDefaultInstance()))
              .setResponseMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.millstream.v1.EmbedResponse.getDefaultInstance()))
              .setSchemaDescriptor(new EmbeddingServiceMethodDescriptorSupplier("Embed"))
              .build();
        }
      }
    }
    return getEmbedMethod;
  }

  private static volatile io.grpc.MethodDescriptor<io.millstream.v1.RerankRequest,
      io.millstream.v1.RerankResponse> getRerankMethod;

  @io.grpc.stub.annotations.RpcMethod(
      fullMethodName = SERVICE_NAME + '/' + "Rerank",
      requestType = io.millstream.v1.RerankRequest.class,
      responseType = io.millstream.v1.RerankResponse.class,
      methodType = io.grpc.MethodDescriptor.MethodType.UNARY)
  public static io.grpc.MethodDescriptor<io.millstream.v1.RerankRequest,
      io.millstream.v1.RerankResponse> getRerankMethod() {
    io.grpc.MethodDescriptor<io.millstream.v1.RerankRequest, io.millstream.v1.RerankResponse> getRerankMethod;
    if ((getRerankMethod = EmbeddingServiceGrpc.getRerankMethod) == null) {
      synchronized (EmbeddingServiceGrpc.class) {
        if ((getRerankMethod = EmbeddingServiceGrpc.getRerankMethod) == null) {
          EmbeddingServiceGrpc.getRerankMethod = getRerankMethod =
              io.grpc.MethodDescriptor.<io.millstream.v1.RerankRequest, io.millstream.v1.RerankResponse>newBuilder()
              .setType(io.grpc.MethodDescriptor.MethodType.UNARY)
              .setFullMethodName(generateFullMethodName(SERVICE_NAME, "Rerank"))
              .setSampledToLocalTracing(true)
              .setRequestMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.millstream.v1.RerankRequest.getDefaultInstance()))
              .setResponseMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.millstream.v1.RerankResponse.getDefaultInstance()))
              .setSchemaDescriptor(new EmbeddingServiceMethodDescriptorSupplier("Rerank"))
              .build();
        }
      }
    }
    return getRerankMethod;
  }

  /**
   * Creates a new async stub that supports all call types for the service
   */
  public static EmbeddingServiceStub newStub(io.grpc.Channel channel) {
    io.grpc.stub.AbstractStub.StubFactory<EmbeddingServiceStub> factory =
      new io.grpc.stub.AbstractStub.StubFactory<EmbeddingServiceStub>() {
        @java.lang.Override
        public EmbeddingServiceStub newStub(io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
          return new EmbeddingServiceStub(channel, callOptions);
        }
      };
    return EmbeddingServiceStub.newStub(factory, channel);
  }

  /**
   * Creates a new blocking-style stub that supports unary and streaming output calls on the service
   */
  public static EmbeddingServiceBlockingStub newBlockingStub(
      io.grpc.Channel channel) {
    io.grpc.stub.AbstractStub.StubFactory<EmbeddingServiceBlockingStub> factory =
      new io.grpc.stub.AbstractStub.StubFactory<EmbeddingServiceBlockingStub>() {
        @java.lang.Override
        public EmbeddingServiceBlockingStub newStub(io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
          return new EmbeddingServiceBlockingStub(channel, callOptions);
        }
      };
    return EmbeddingServiceBlockingStub.newStub(factory, channel);
  }

  /**
   * Creates a new ListenableFuture-style stub that supports unary calls on the service
   */
  public static EmbeddingServiceFutureStub newFutureStub(
      io.grpc.Channel channel) {
    io.grpc.stub.AbstractStub.StubFactory<EmbeddingServiceFutureStub> factory =
      new io.grpc.stub.AbstractStub.StubFactory<EmbeddingServiceFutureStub>() {
        @java.lang.Override
        public EmbeddingServiceFutureStub newStub(io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
          return new EmbeddingServiceFutureStub(channel, callOptions);
        }
      };
    return EmbeddingServiceFutureStub.newStub(factory, channel);
  }

  /**
   * <pre>
   * EmbeddingService turns texts into vectors, and ranks documents. EMBEDDING workers serve it, and the
   * Processor, which tokenizes and forwards to them: the same messages at both, but workers take token
   * ids only.
   * </pre>
   */
  public static abstract class EmbeddingServiceImplBase implements io.grpc.BindableService {

    /**
     * <pre>
     * Embed carries any number of batches on one stream.
     * A batch uses a *slot*, a number chosen by the caller. The caller MUST NOT reuse a slot before it has
     * received the slot's terminal entry: exactly one, in EmbedResponse.finished or .errors. A batch that
     * fails ends neither the stream nor other batches. Vectors come as they finish, in any order, each
     * once, with the index of its input, and before `finished`. When the caller closes its side, open
     * batches still end; when the RPC is cancelled, so are they.
     * </pre>
     */
    public io.grpc.stub.StreamObserver<io.millstream.v1.EmbedRequest> embed(
        io.grpc.stub.StreamObserver<io.millstream.v1.EmbedResponse> responseObserver) {
      return io.grpc.stub.ServerCalls.asyncUnimplementedStreamingCall(getEmbedMethod(), responseObserver);
    }

    /**
     * <pre>
     * Rerank scores documents by how well they answer a query. Its deadline and its trace context are the
     * RPC's.
     * </pre>
     */
    public void rerank(io.millstream.v1.RerankRequest request,
        io.grpc.stub.StreamObserver<io.millstream.v1.RerankResponse> responseObserver) {
      io.grpc.stub.ServerCalls.asyncUnimplementedUnaryCall(getRerankMethod(), responseObserver);
    }

    @java.lang.Override public final io.grpc.ServerServiceDefinition bindService() {
      return io.grpc.ServerServiceDefinition.builder(getServiceDescriptor())
          .addMethod(
            getEmbedMethod(),
            io.grpc.stub.ServerCalls.asyncBidiStreamingCall(
              new MethodHandlers<
                io.millstream.v1.EmbedRequest,
                io.millstream.v1.EmbedResponse>(
                  this, METHODID_EMBED)))
          .addMethod(
            getRerankMethod(),
            io.grpc.stub.ServerCalls.asyncUnaryCall(
              new MethodHandlers<
                io.millstream.v1.RerankRequest,
                io.millstream.v1.RerankResponse>(
                  this, METHODID_RERANK)))
          .build();
    }
  }

  /**
   * <pre>
   * EmbeddingService turns texts into vectors, and ranks documents. EMBEDDING workers serve it, and the
   * Processor, which tokenizes and forwards to them: the same messages at both, but workers take token
   * ids only.
   * </pre>
   */
  public static final class EmbeddingServiceStub extends io.grpc.stub.AbstractAsyncStub<EmbeddingServiceStub> {
    private EmbeddingServiceStub(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      super(channel, callOptions);
    }

    @java.lang.Override
    protected EmbeddingServiceStub build(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      return new EmbeddingServiceStub(channel, callOptions);
    }

    /**
     * <pre>
     * Embed carries any number of batches on one stream.
     * A batch uses a *slot*, a number chosen by the caller. The caller MUST NOT reuse a slot before it has
     * received the slot's terminal entry: exactly one, in EmbedResponse.finished or .errors. A batch that
     * fails ends neither the stream nor other batches. Vectors come as they finish, in any order, each
     * once, with the index of its input, and before `finished`. When the caller closes its side, open
     * batches still end; when the RPC is cancelled, so are they.
     * </pre>
     */
    public io.grpc.stub.StreamObserver<io.millstream.v1.EmbedRequest> embed(
        io.grpc.stub.StreamObserver<io.millstream.v1.EmbedResponse> responseObserver) {
      return io.grpc.stub.ClientCalls.asyncBidiStreamingCall(
          getChannel().newCall(getEmbedMethod(), getCallOptions()), responseObserver);
    }

    /**
     * <pre>
     * Rerank scores documents by how well they answer a query. Its deadline and its trace context are the
     * RPC's.
     * </pre>
     */
    public void rerank(io.millstream.v1.RerankRequest request,
        io.grpc.stub.StreamObserver<io.millstream.v1.RerankResponse> responseObserver) {
      io.grpc.stub.ClientCalls.asyncUnaryCall(
          getChannel().newCall(getRerankMethod(), getCallOptions()), request, responseObserver);
    }
  }

  /**
   * <pre>
   * EmbeddingService turns texts into vectors, and ranks documents. EMBEDDING workers serve it, and the
   * Processor, which tokenizes and forwards to them: the same messages at both, but workers take token
   * ids only.
   * </pre>
   */
  public static final class EmbeddingServiceBlockingStub extends io.grpc.stub.AbstractBlockingStub<EmbeddingServiceBlockingStub> {
    private EmbeddingServiceBlockingStub(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      super(channel, callOptions);
    }

    @java.lang.Override
    protected EmbeddingServiceBlockingStub build(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      return new EmbeddingServiceBlockingStub(channel, callOptions);
    }

    /**
     * <pre>
     * Rerank scores documents by how well they answer a query. Its deadline and its trace context are the
     * RPC's.
     * </pre>
     */
    public io.millstream.v1.RerankResponse rerank(io.millstream.v1.RerankRequest request) {
      return io.grpc.stub.ClientCalls.blockingUnaryCall(
          getChannel(), getRerankMethod(), getCallOptions(), request);
    }
  }

  /**
   * <pre>
   * EmbeddingService turns texts into vectors, and ranks documents. EMBEDDING workers serve it, and the
   * Processor, which tokenizes and forwards to them: the same messages at both, but workers take token
   * ids only.
   * </pre>
   */
  public static final class EmbeddingServiceFutureStub extends io.grpc.stub.AbstractFutureStub<EmbeddingServiceFutureStub> {
    private EmbeddingServiceFutureStub(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      super(channel, callOptions);
    }

    @java.lang.Override
    protected EmbeddingServiceFutureStub build(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      return new EmbeddingServiceFutureStub(channel, callOptions);
    }

    /**
     * <pre>
     * Rerank scores documents by how well they answer a query. Its deadline and its trace context are the
     * RPC's.
     * </pre>
     */
    public com.google.common.util.concurrent.ListenableFuture<io.millstream.v1.RerankResponse> rerank(
        io.millstream.v1.RerankRequest request) {
      return io.grpc.stub.ClientCalls.futureUnaryCall(
          getChannel().newCall(getRerankMethod(), getCallOptions()), request);
    }
  }

  private static final int METHODID_RERANK = 0;
  private static final int METHODID_EMBED = 1;

  private static final class MethodHandlers<Req, Resp> implements
      io.grpc.stub.ServerCalls.UnaryMethod<Req, Resp>,
      io.grpc.stub.ServerCalls.ServerStreamingMethod<Req, Resp>,
      io.grpc.stub.ServerCalls.ClientStreamingMethod<Req, Resp>,
      io.grpc.stub.ServerCalls.BidiStreamingMethod<Req, Resp> {
    private final EmbeddingServiceImplBase serviceImpl;
    private final int methodId;

    MethodHandlers(EmbeddingServiceImplBase serviceImpl, int methodId) {
      this.serviceImpl = serviceImpl;
      this.methodId = methodId;
    }

    @java.lang.Override
    @java.lang.SuppressWarnings("unchecked")
    public void invoke(Req request, io.grpc.stub.StreamObserver<Resp> responseObserver) {
      switch (methodId) {
        case METHODID_RERANK:
          serviceImpl.rerank((io.millstream.v1.RerankRequest) request,
              (io.grpc.stub.StreamObserver<io.millstream.v1.RerankResponse>) responseObserver);
          break;
        default:
          throw new AssertionError();
      }
    }

    @java.lang.Override
    @java.lang.SuppressWarnings("unchecked")
    public io.grpc.stub.StreamObserver<Req> invoke(
        io.grpc.stub.StreamObserver<Resp> responseObserver) {
      switch (methodId) {
        case METHODID_EMBED:
          return (io.grpc.stub.StreamObserver<Req>) serviceImpl.embed(
              (io.grpc.stub.StreamObserver<io.millstream.v1.EmbedResponse>) responseObserver);
        default:
          throw new AssertionError();
      }
    }
  }

  private static abstract class EmbeddingServiceBaseDescriptorSupplier
      implements io.grpc.protobuf.ProtoFileDescriptorSupplier, io.grpc.protobuf.ProtoServiceDescriptorSupplier {
    EmbeddingServiceBaseDescriptorSupplier() {}

    @java.lang.Override
    public com.google.protobuf.Descriptors.FileDescriptor getFileDescriptor() {
      return io.millstream.v1.EmbeddingProto.getDescriptor();
    }

    @java.lang.Override
    public com.google.protobuf.Descriptors.ServiceDescriptor getServiceDescriptor() {
      return getFileDescriptor().findServiceByName("EmbeddingService");
    }
  }

  private static final class EmbeddingServiceFileDescriptorSupplier
      extends EmbeddingServiceBaseDescriptorSupplier {
    EmbeddingServiceFileDescriptorSupplier() {}
  }

  private static final class EmbeddingServiceMethodDescriptorSupplier
      extends EmbeddingServiceBaseDescriptorSupplier
      implements io.grpc.protobuf.ProtoMethodDescriptorSupplier {
    private final String methodName;

    EmbeddingServiceMethodDescriptorSupplier(String methodName) {
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
      synchronized (EmbeddingServiceGrpc.class) {
        result = serviceDescriptor;
        if (result == null) {
          serviceDescriptor = result = io.grpc.ServiceDescriptor.newBuilder(SERVICE_NAME)
              .setSchemaDescriptor(new EmbeddingServiceFileDescriptorSupplier())
              .addMethod(getEmbedMethod())
              .addMethod(getRerankMethod())
              .build();
        }
      }
    }
    return result;
  }
}
