package io.millstream.v1;

import static io.grpc.MethodDescriptor.generateFullMethodName;

/**
 * <pre>
 * DecodeService generates tokens. An AGGREGATED worker runs the prompt itself; a DECODE worker gets
 * the KV cache from a prefill worker.
 * </pre>
 */
@io.grpc.stub.annotations.GrpcGenerated
public final class DecodeServiceGrpc {

  private DecodeServiceGrpc() {}

  public static final String SERVICE_NAME = "millstream.v1.DecodeService";

  // Static method descriptors that strictly reflect the proto.
  private static volatile io.grpc.MethodDescriptor<io.millstream.v1.DecodeRequest,
      io.millstream.v1.DecodeResponse> getDecodeMethod;

  @io.grpc.stub.annotations.RpcMethod(
      fullMethodName = SERVICE_NAME + '/' + "Decode",
      requestType = io.millstream.v1.DecodeRequest.class,
      responseType = io.millstream.v1.DecodeResponse.class,
      methodType = io.grpc.MethodDescriptor.MethodType.BIDI_STREAMING)
  public static io.grpc.MethodDescriptor<io.millstream.v1.DecodeRequest,
      io.millstream.v1.DecodeResponse> getDecodeMethod() {
    io.grpc.MethodDescriptor<io.millstream.v1.DecodeRequest, io.millstream.v1.DecodeResponse> getDecodeMethod;
    if ((getDecodeMethod = DecodeServiceGrpc.getDecodeMethod) == null) {
      synchronized (DecodeServiceGrpc.class) {
        if ((getDecodeMethod = DecodeServiceGrpc.getDecodeMethod) == null) {
          DecodeServiceGrpc.getDecodeMethod = getDecodeMethod =
              io.grpc.MethodDescriptor.<io.millstream.v1.DecodeRequest, io.millstream.v1.DecodeResponse>newBuilder()
              .setType(io.grpc.MethodDescriptor.MethodType.BIDI_STREAMING)
              .setFullMethodName(generateFullMethodName(SERVICE_NAME, "Decode"))
              .setSampledToLocalTracing(true)
              .setRequestMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.millstream.v1.DecodeRequest.getDefaultInstance()))
              .setResponseMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.millstream.v1.DecodeResponse.getDefaultInstance()))
              .setSchemaDescriptor(new DecodeServiceMethodDescriptorSupplier("Decode"))
              .build();
        }
      }
    }
    return getDecodeMethod;
  }

  /**
   * Creates a new async stub that supports all call types for the service
   */
  public static DecodeServiceStub newStub(io.grpc.Channel channel) {
    io.grpc.stub.AbstractStub.StubFactory<DecodeServiceStub> factory =
      new io.grpc.stub.AbstractStub.StubFactory<DecodeServiceStub>() {
        @java.lang.Override
        public DecodeServiceStub newStub(io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
          return new DecodeServiceStub(channel, callOptions);
        }
      };
    return DecodeServiceStub.newStub(factory, channel);
  }

  /**
   * Creates a new blocking-style stub that supports unary and streaming output calls on the service
   */
  public static DecodeServiceBlockingStub newBlockingStub(
      io.grpc.Channel channel) {
    io.grpc.stub.AbstractStub.StubFactory<DecodeServiceBlockingStub> factory =
      new io.grpc.stub.AbstractStub.StubFactory<DecodeServiceBlockingStub>() {
        @java.lang.Override
        public DecodeServiceBlockingStub newStub(io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
          return new DecodeServiceBlockingStub(channel, callOptions);
        }
      };
    return DecodeServiceBlockingStub.newStub(factory, channel);
  }

  /**
   * Creates a new ListenableFuture-style stub that supports unary calls on the service
   */
  public static DecodeServiceFutureStub newFutureStub(
      io.grpc.Channel channel) {
    io.grpc.stub.AbstractStub.StubFactory<DecodeServiceFutureStub> factory =
      new io.grpc.stub.AbstractStub.StubFactory<DecodeServiceFutureStub>() {
        @java.lang.Override
        public DecodeServiceFutureStub newStub(io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
          return new DecodeServiceFutureStub(channel, callOptions);
        }
      };
    return DecodeServiceFutureStub.newStub(factory, channel);
  }

  /**
   * <pre>
   * DecodeService generates tokens. An AGGREGATED worker runs the prompt itself; a DECODE worker gets
   * the KV cache from a prefill worker.
   * </pre>
   */
  public static abstract class DecodeServiceImplBase implements io.grpc.BindableService {

    /**
     * <pre>
     * Decode carries any number of requests on one stream; generation.proto states the rules. On a
     * DECODE worker each request needs the same ticket as its prefill leg; its first token is the one
     * that prefill drew.
     * </pre>
     */
    public io.grpc.stub.StreamObserver<io.millstream.v1.DecodeRequest> decode(
        io.grpc.stub.StreamObserver<io.millstream.v1.DecodeResponse> responseObserver) {
      return io.grpc.stub.ServerCalls.asyncUnimplementedStreamingCall(getDecodeMethod(), responseObserver);
    }

    @java.lang.Override public final io.grpc.ServerServiceDefinition bindService() {
      return io.grpc.ServerServiceDefinition.builder(getServiceDescriptor())
          .addMethod(
            getDecodeMethod(),
            io.grpc.stub.ServerCalls.asyncBidiStreamingCall(
              new MethodHandlers<
                io.millstream.v1.DecodeRequest,
                io.millstream.v1.DecodeResponse>(
                  this, METHODID_DECODE)))
          .build();
    }
  }

  /**
   * <pre>
   * DecodeService generates tokens. An AGGREGATED worker runs the prompt itself; a DECODE worker gets
   * the KV cache from a prefill worker.
   * </pre>
   */
  public static final class DecodeServiceStub extends io.grpc.stub.AbstractAsyncStub<DecodeServiceStub> {
    private DecodeServiceStub(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      super(channel, callOptions);
    }

    @java.lang.Override
    protected DecodeServiceStub build(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      return new DecodeServiceStub(channel, callOptions);
    }

    /**
     * <pre>
     * Decode carries any number of requests on one stream; generation.proto states the rules. On a
     * DECODE worker each request needs the same ticket as its prefill leg; its first token is the one
     * that prefill drew.
     * </pre>
     */
    public io.grpc.stub.StreamObserver<io.millstream.v1.DecodeRequest> decode(
        io.grpc.stub.StreamObserver<io.millstream.v1.DecodeResponse> responseObserver) {
      return io.grpc.stub.ClientCalls.asyncBidiStreamingCall(
          getChannel().newCall(getDecodeMethod(), getCallOptions()), responseObserver);
    }
  }

  /**
   * <pre>
   * DecodeService generates tokens. An AGGREGATED worker runs the prompt itself; a DECODE worker gets
   * the KV cache from a prefill worker.
   * </pre>
   */
  public static final class DecodeServiceBlockingStub extends io.grpc.stub.AbstractBlockingStub<DecodeServiceBlockingStub> {
    private DecodeServiceBlockingStub(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      super(channel, callOptions);
    }

    @java.lang.Override
    protected DecodeServiceBlockingStub build(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      return new DecodeServiceBlockingStub(channel, callOptions);
    }
  }

  /**
   * <pre>
   * DecodeService generates tokens. An AGGREGATED worker runs the prompt itself; a DECODE worker gets
   * the KV cache from a prefill worker.
   * </pre>
   */
  public static final class DecodeServiceFutureStub extends io.grpc.stub.AbstractFutureStub<DecodeServiceFutureStub> {
    private DecodeServiceFutureStub(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      super(channel, callOptions);
    }

    @java.lang.Override
    protected DecodeServiceFutureStub build(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      return new DecodeServiceFutureStub(channel, callOptions);
    }
  }

  private static final int METHODID_DECODE = 0;

  private static final class MethodHandlers<Req, Resp> implements
      io.grpc.stub.ServerCalls.UnaryMethod<Req, Resp>,
      io.grpc.stub.ServerCalls.ServerStreamingMethod<Req, Resp>,
      io.grpc.stub.ServerCalls.ClientStreamingMethod<Req, Resp>,
      io.grpc.stub.ServerCalls.BidiStreamingMethod<Req, Resp> {
    private final DecodeServiceImplBase serviceImpl;
    private final int methodId;

    MethodHandlers(DecodeServiceImplBase serviceImpl, int methodId) {
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
        case METHODID_DECODE:
          return (io.grpc.stub.StreamObserver<Req>) serviceImpl.decode(
              (io.grpc.stub.StreamObserver<io.millstream.v1.DecodeResponse>) responseObserver);
        default:
          throw new AssertionError();
      }
    }
  }

  private static abstract class DecodeServiceBaseDescriptorSupplier
      implements io.grpc.protobuf.ProtoFileDescriptorSupplier, io.grpc.protobuf.ProtoServiceDescriptorSupplier {
    DecodeServiceBaseDescriptorSupplier() {}

    @java.lang.Override
    public com.google.protobuf.Descriptors.FileDescriptor getFileDescriptor() {
      return io.millstream.v1.DecodeProto.getDescriptor();
    }

    @java.lang.Override
    public com.google.protobuf.Descriptors.ServiceDescriptor getServiceDescriptor() {
      return getFileDescriptor().findServiceByName("DecodeService");
    }
  }

  private static final class DecodeServiceFileDescriptorSupplier
      extends DecodeServiceBaseDescriptorSupplier {
    DecodeServiceFileDescriptorSupplier() {}
  }

  private static final class DecodeServiceMethodDescriptorSupplier
      extends DecodeServiceBaseDescriptorSupplier
      implements io.grpc.protobuf.ProtoMethodDescriptorSupplier {
    private final String methodName;

    DecodeServiceMethodDescriptorSupplier(String methodName) {
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
      synchronized (DecodeServiceGrpc.class) {
        result = serviceDescriptor;
        if (result == null) {
          serviceDescriptor = result = io.grpc.ServiceDescriptor.newBuilder(SERVICE_NAME)
              .setSchemaDescriptor(new DecodeServiceFileDescriptorSupplier())
              .addMethod(getDecodeMethod())
              .build();
        }
      }
    }
    return result;
  }
}
