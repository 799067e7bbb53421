package io.millstream.v1;

import static io.grpc.MethodDescriptor.generateFullMethodName;

/**
 * <pre>
 * EncodeService turns images and videos into what a language model reads in place of their
 * placeholder tokens. ENCODE workers serve it, and AGGREGATED workers whose engine runs the vision
 * tower; those make pixels for themselves.
 * </pre>
 */
@io.grpc.stub.annotations.GrpcGenerated
public final class EncodeServiceGrpc {

  private EncodeServiceGrpc() {}

  public static final String SERVICE_NAME = "millstream.v1.EncodeService";

  // Static method descriptors that strictly reflect the proto.
  private static volatile io.grpc.MethodDescriptor<io.millstream.v1.EncodeRequest,
      io.millstream.v1.EncodeResponse> getEncodeMethod;

  @io.grpc.stub.annotations.RpcMethod(
      fullMethodName = SERVICE_NAME + '/' + "Encode",
      requestType = io.millstream.v1.EncodeRequest.class,
      responseType = io.millstream.v1.EncodeResponse.class,
      methodType = io.grpc.MethodDescriptor.MethodType.BIDI_STREAMING)
  public static io.grpc.MethodDescriptor<io.millstream.v1.EncodeRequest,
      io.millstream.v1.EncodeResponse> getEncodeMethod() {
    io.grpc.MethodDescriptor<io.millstream.v1.EncodeRequest, io.millstream.v1.EncodeResponse> getEncodeMethod;
    if ((getEncodeMethod = EncodeServiceGrpc.getEncodeMethod) == null) {
      synchronized (EncodeServiceGrpc.class) {
        if ((getEncodeMethod = EncodeServiceGrpc.getEncodeMethod) == null) {
          EncodeServiceGrpc.getEncodeMethod = getEncodeMethod =
              io.grpc.MethodDescriptor.<io.millstream.v1.EncodeRequest, io.millstream.v1.EncodeResponse>newBuilder()
              .setType(io.grpc.MethodDescriptor.MethodType.BIDI_STREAMING)
              .setFullMethodName(generateFullMethodName(SERVICE_NAME, "Encode"))
              .setSampledToLocalTracing(true)
              .setRequestMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.millstream.v1.EncodeRequest.getDefaultInstance()))
              .setResponseMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.millstream.v1.EncodeResponse.getDefaultInstance()))
              .setSchemaDescriptor(new EncodeServiceMethodDescriptorSupplier("Encode"))
              .build();
        }
      }
    }
    return getEncodeMethod;
  }

  private static volatile io.grpc.MethodDescriptor<io.millstream.v1.FetchRequest,
      io.millstream.v1.FetchResponse> getFetchMethod;

  @io.grpc.stub.annotations.RpcMethod(
      fullMethodName = SERVICE_NAME + '/' + "Fetch",
      requestType = io.millstream.v1.FetchRequest.class,
      responseType = io.millstream.v1.FetchResponse.class,
      methodType = io.grpc.MethodDescriptor.MethodType.BIDI_STREAMING)
  public static io.grpc.MethodDescriptor<io.millstream.v1.FetchRequest,
      io.millstream.v1.FetchResponse> getFetchMethod() {
    io.grpc.MethodDescriptor<io.millstream.v1.FetchRequest, io.millstream.v1.FetchResponse> getFetchMethod;
    if ((getFetchMethod = EncodeServiceGrpc.getFetchMethod) == null) {
      synchronized (EncodeServiceGrpc.class) {
        if ((getFetchMethod = EncodeServiceGrpc.getFetchMethod) == null) {
          EncodeServiceGrpc.getFetchMethod = getFetchMethod =
              io.grpc.MethodDescriptor.<io.millstream.v1.FetchRequest, io.millstream.v1.FetchResponse>newBuilder()
              .setType(io.grpc.MethodDescriptor.MethodType.BIDI_STREAMING)
              .setFullMethodName(generateFullMethodName(SERVICE_NAME, "Fetch"))
              .setSampledToLocalTracing(true)
              .setRequestMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.millstream.v1.FetchRequest.getDefaultInstance()))
              .setResponseMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.millstream.v1.FetchResponse.getDefaultInstance()))
              .setSchemaDescriptor(new EncodeServiceMethodDescriptorSupplier("Fetch"))
              .build();
        }
      }
    }
    return getFetchMethod;
  }

  /**
   * Creates a new async stub that supports all call types for the service
   */
  public static EncodeServiceStub newStub(io.grpc.Channel channel) {
    io.grpc.stub.AbstractStub.StubFactory<EncodeServiceStub> factory =
      new io.grpc.stub.AbstractStub.StubFactory<EncodeServiceStub>() {
        @java.lang.Override
        public EncodeServiceStub newStub(io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
          return new EncodeServiceStub(channel, callOptions);
        }
      };
    return EncodeServiceStub.newStub(factory, channel);
  }

  /**
   * Creates a new blocking-style stub that supports unary and streaming output calls on the service
   */
  public static EncodeServiceBlockingStub newBlockingStub(
      io.grpc.Channel channel) {
    io.grpc.stub.AbstractStub.StubFactory<EncodeServiceBlockingStub> factory =
      new io.grpc.stub.AbstractStub.StubFactory<EncodeServiceBlockingStub>() {
        @java.lang.Override
        public EncodeServiceBlockingStub newStub(io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
          return new EncodeServiceBlockingStub(channel, callOptions);
        }
      };
    return EncodeServiceBlockingStub.newStub(factory, channel);
  }

  /**
   * Creates a new ListenableFuture-style stub that supports unary calls on the service
   */
  public static EncodeServiceFutureStub newFutureStub(
      io.grpc.Channel channel) {
    io.grpc.stub.AbstractStub.StubFactory<EncodeServiceFutureStub> factory =
      new io.grpc.stub.AbstractStub.StubFactory<EncodeServiceFutureStub>() {
        @java.lang.Override
        public EncodeServiceFutureStub newStub(io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
          return new EncodeServiceFutureStub(channel, callOptions);
        }
      };
    return EncodeServiceFutureStub.newStub(factory, channel);
  }

  /**
   * <pre>
   * EncodeService turns images and videos into what a language model reads in place of their
   * placeholder tokens. ENCODE workers serve it, and AGGREGATED workers whose engine runs the vision
   * tower; those make pixels for themselves.
   * </pre>
   */
  public static abstract class EncodeServiceImplBase implements io.grpc.BindableService {

    /**
     * <pre>
     * Encode carries any number of items on one stream, usually one stream per Processor–worker pair.
     * An item uses a *slot*, a number chosen by the caller. The caller MUST NOT reuse a slot before it has
     * received the slot's terminal entry: exactly one, in EncodeResponse.encoded or .errors. An item that
     * fails ends neither the stream nor other items.
     * The result stays on the worker under a lease until the caller releases it, the lease expires, or the
     * stream ends; a fetch that runs then still completes.
     * </pre>
     */
    public io.grpc.stub.StreamObserver<io.millstream.v1.EncodeRequest> encode(
        io.grpc.stub.StreamObserver<io.millstream.v1.EncodeResponse> responseObserver) {
      return io.grpc.stub.ServerCalls.asyncUnimplementedStreamingCall(getEncodeMethod(), responseObserver);
    }

    /**
     * <pre>
     * Fetch hands one result to the worker that needs it. The caller sends `start`; the worker sends an
     * `offer` that says which way the bytes go, and then, if the way is `inline`, all chunks. The caller
     * MUST send `done` when it has the bytes, or `failed`; the worker confirms with `released` and ends
     * the stream. So both sides know the outcome; a stream that breaks before is a failed fetch, and the
     * worker frees what it held for it. It cuts a caller off that takes and sends nothing for 15 s.
     * </pre>
     */
    public io.grpc.stub.StreamObserver<io.millstream.v1.FetchRequest> fetch(
        io.grpc.stub.StreamObserver<io.millstream.v1.FetchResponse> responseObserver) {
      return io.grpc.stub.ServerCalls.asyncUnimplementedStreamingCall(getFetchMethod(), responseObserver);
    }

    @java.lang.Override public final io.grpc.ServerServiceDefinition bindService() {
      return io.grpc.ServerServiceDefinition.builder(getServiceDescriptor())
          .addMethod(
            getEncodeMethod(),
            io.grpc.stub.ServerCalls.asyncBidiStreamingCall(
              new MethodHandlers<
                io.millstream.v1.EncodeRequest,
                io.millstream.v1.EncodeResponse>(
                  this, METHODID_ENCODE)))
          .addMethod(
            getFetchMethod(),
            io.grpc.stub.ServerCalls.asyncBidiStreamingCall(
              new MethodHandlers<
                io.millstream.v1.FetchRequest,
                io.millstream.v1.FetchResponse>(
                  this, METHODID_FETCH)))
          .build();
    }
  }

  /**
   * <pre>
   * EncodeService turns images and videos into what a language model reads in place of their
   * placeholder tokens. ENCODE workers serve it, and AGGREGATED workers whose engine runs the vision
   * tower; those make pixels for themselves.
   * </pre>
   */
  public static final class EncodeServiceStub extends io.grpc.stub.AbstractAsyncStub<EncodeServiceStub> {
    private EncodeServiceStub(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      super(channel, callOptions);
    }

    @java.lang.Override
    protected EncodeServiceStub build(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      return new EncodeServiceStub(channel, callOptions);
    }

    /**
     * <pre>
     * Encode carries any number of items on one stream, usually one stream per Processor–worker pair.
     * An item uses a *slot*, a number chosen by the caller. The caller MUST NOT reuse a slot before it has
     * received the slot's terminal entry: exactly one, in EncodeResponse.encoded or .errors. An item that
     * fails ends neither the stream nor other items.
     * The result stays on the worker under a lease until the caller releases it, the lease expires, or the
     * stream ends; a fetch that runs then still completes.
     * </pre>
     */
    public io.grpc.stub.StreamObserver<io.millstream.v1.EncodeRequest> encode(
        io.grpc.stub.StreamObserver<io.millstream.v1.EncodeResponse> responseObserver) {
      return io.grpc.stub.ClientCalls.asyncBidiStreamingCall(
          getChannel().newCall(getEncodeMethod(), getCallOptions()), responseObserver);
    }

    /**
     * <pre>
     * Fetch hands one result to the worker that needs it. The caller sends `start`; the worker sends an
     * `offer` that says which way the bytes go, and then, if the way is `inline`, all chunks. The caller
     * MUST send `done` when it has the bytes, or `failed`; the worker confirms with `released` and ends
     * the stream. So both sides know the outcome; a stream that breaks before is a failed fetch, and the
     * worker frees what it held for it. It cuts a caller off that takes and sends nothing for 15 s.
     * </pre>
     */
    public io.grpc.stub.StreamObserver<io.millstream.v1.FetchRequest> fetch(
        io.grpc.stub.StreamObserver<io.millstream.v1.FetchResponse> responseObserver) {
      return io.grpc.stub.ClientCalls.asyncBidiStreamingCall(
          getChannel().newCall(getFetchMethod(), getCallOptions()), responseObserver);
    }
  }

  /**
   * <pre>
   * EncodeService turns images and videos into what a language model reads in place of their
   * placeholder tokens. ENCODE workers serve it, and AGGREGATED workers whose engine runs the vision
   * tower; those make pixels for themselves.
   * </pre>
   */
  public static final class EncodeServiceBlockingStub extends io.grpc.stub.AbstractBlockingStub<EncodeServiceBlockingStub> {
    private EncodeServiceBlockingStub(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      super(channel, callOptions);
    }

    @java.lang.Override
    protected EncodeServiceBlockingStub build(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      return new EncodeServiceBlockingStub(channel, callOptions);
    }
  }

  /**
   * <pre>
   * EncodeService turns images and videos into what a language model reads in place of their
   * placeholder tokens. ENCODE workers serve it, and AGGREGATED workers whose engine runs the vision
   * tower; those make pixels for themselves.
   * </pre>
   */
  public static final class EncodeServiceFutureStub extends io.grpc.stub.AbstractFutureStub<EncodeServiceFutureStub> {
    private EncodeServiceFutureStub(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      super(channel, callOptions);
    }

    @java.lang.Override
    protected EncodeServiceFutureStub build(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      return new EncodeServiceFutureStub(channel, callOptions);
    }
  }

  private static final int METHODID_ENCODE = 0;
  private static final int METHODID_FETCH = 1;

  private static final class MethodHandlers<Req, Resp> implements
      io.grpc.stub.ServerCalls.UnaryMethod<Req, Resp>,
      io.grpc.stub.ServerCalls.ServerStreamingMethod<Req, Resp>,
      io.grpc.stub.ServerCalls.ClientStreamingMethod<Req, Resp>,
      io.grpc.stub.ServerCalls.BidiStreamingMethod<Req, Resp> {
    private final EncodeServiceImplBase serviceImpl;
    private final int methodId;

    MethodHandlers(EncodeServiceImplBase serviceImpl, int methodId) {
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
        case METHODID_ENCODE:
          return (io.grpc.stub.StreamObserver<Req>) serviceImpl.encode(
              (io.grpc.stub.StreamObserver<io.millstream.v1.EncodeResponse>) responseObserver);
        case METHODID_FETCH:
          return (io.grpc.stub.StreamObserver<Req>) serviceImpl.fetch(
              (io.grpc.stub.StreamObserver<io.millstream.v1.FetchResponse>) responseObserver);
        default:
          throw new AssertionError();
      }
    }
  }

  private static abstract class EncodeServiceBaseDescriptorSupplier
      implements io.grpc.protobuf.ProtoFileDescriptorSupplier, io.grpc.protobuf.ProtoServiceDescriptorSupplier {
    EncodeServiceBaseDescriptorSupplier() {}

    @java.lang.Override
    public com.google.protobuf.Descriptors.FileDescriptor getFileDescriptor() {
      return io.millstream.v1.EncodeProto.getDescriptor();
    }

    @java.lang.Override
    public com.google.protobuf.Descriptors.ServiceDescriptor getServiceDescriptor() {
      return getFileDescriptor().findServiceByName("EncodeService");
    }
  }

  private static final class EncodeServiceFileDescriptorSupplier
      extends EncodeServiceBaseDescriptorSupplier {
    EncodeServiceFileDescriptorSupplier() {}
  }

  private static final class EncodeServiceMethodDescriptorSupplier
      extends EncodeServiceBaseDescriptorSupplier
      implements io.grpc.protobuf.ProtoMethodDescriptorSupplier {
    private final String methodName;

    EncodeServiceMethodDescriptorSupplier(String methodName) {
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
      synchronized (EncodeServiceGrpc.class) {
        result = serviceDescriptor;
        if (result == null) {
          serviceDescriptor = result = io.grpc.ServiceDescriptor.newBuilder(SERVICE_NAME)
              .setSchemaDescriptor(new EncodeServiceFileDescriptorSupplier())
              .addMethod(getEncodeMethod())
              .addMethod(getFetchMethod())
              .build();
        }
      }
    }
    return result;
  }
}
