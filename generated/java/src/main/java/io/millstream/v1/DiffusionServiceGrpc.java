package io.millstream.v1;

import static io.grpc.MethodDescriptor.generateFullMethodName;

/**
 * <pre>
 * DiffusionService generates with diffusion models: text, images, videos. DIFFUSION workers serve it,
 * and the Processor, which forwards to them: the same messages at both. A worker serves one of the
 * methods; at the others it ends the RPC with UNIMPLEMENTED, reason UNSUPPORTED_FEATURE, and the message
 * names the kind of worker that serves them.
 * </pre>
 */
@io.grpc.stub.annotations.GrpcGenerated
public final class DiffusionServiceGrpc {

  private DiffusionServiceGrpc() {}

  public static final String SERVICE_NAME = "millstream.v1.DiffusionService";

  // Static method descriptors that strictly reflect the proto.
  private static volatile io.grpc.MethodDescriptor<io.millstream.v1.GenerateTextRequest,
      io.millstream.v1.GenerateTextResponse> getGenerateTextMethod;

  @io.grpc.stub.annotations.RpcMethod(
      fullMethodName = SERVICE_NAME + '/' + "GenerateText",
      requestType = io.millstream.v1.GenerateTextRequest.class,
      responseType = io.millstream.v1.GenerateTextResponse.class,
      methodType = io.grpc.MethodDescriptor.MethodType.BIDI_STREAMING)
  public static io.grpc.MethodDescriptor<io.millstream.v1.GenerateTextRequest,
      io.millstream.v1.GenerateTextResponse> getGenerateTextMethod() {
    io.grpc.MethodDescriptor<io.millstream.v1.GenerateTextRequest, io.millstream.v1.GenerateTextResponse> getGenerateTextMethod;
    if ((getGenerateTextMethod = DiffusionServiceGrpc.getGenerateTextMethod) == null) {
      synchronized (DiffusionServiceGrpc.class) {
        if ((getGenerateTextMethod = DiffusionServiceGrpc.getGenerateTextMethod) == null) {
          DiffusionServiceGrpc.getGenerateTextMethod = getGenerateTextMethod =
              io.grpc.MethodDescriptor.<io.millstream.v1.GenerateTextRequest, io.millstream.v1.GenerateTextResponse>newBuilder()
              .setType(io.grpc.MethodDescriptor.MethodType.BIDI_STREAMING)
              .setFullMethodName(generateFullMethodName(SERVICE_NAME, "GenerateText"))
              .setSampledToLocalTracing(true)
              .setRequestMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.millstream.v1.GenerateTextRequest.getDefaultInstance()))
              .setResponseMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.millstream.v1.GenerateTextResponse.getDefaultInstance()))
              .setSchemaDescriptor(new DiffusionServiceMethodDescriptorSupplier("GenerateText"))
              .build();
        }
      }
    }
    return getGenerateTextMethod;
  }

  private static volatile io.grpc.MethodDescriptor<io.millstream.v1.GenerateImageRequest,
      io.millstream.v1.GenerateImageResponse> getGenerateImageMethod;

  @io.grpc.stub.annotations.RpcMethod(
      fullMethodName = SERVICE_NAME + '/' + "GenerateImage",
      requestType = io.millstream.v1.GenerateImageRequest.class,
      responseType = io.millstream.v1.GenerateImageResponse.class,
      methodType = io.grpc.MethodDescriptor.MethodType.BIDI_STREAMING)
  public static io.grpc.MethodDescriptor<io.millstream.v1.GenerateImageRequest,
      io.millstream.v1.GenerateImageResponse> getGenerateImageMethod() {
    io.grpc.MethodDescriptor<io.millstream.v1.GenerateImageRequest, io.millstream.v1.GenerateImageResponse> getGenerateImageMethod;
    if ((getGenerateImageMethod = DiffusionServiceGrpc.getGenerateImageMethod) == null) {
      synchronized (DiffusionServiceGrpc.class) {
        if ((getGenerateImageMethod = DiffusionServiceGrpc.getGenerateImageMethod) == null) {
          DiffusionServiceGrpc.getGenerateImageMethod = getGenerateImageMethod =
              io.grpc.MethodDescriptor.<io.millstream.v1.GenerateImageRequest, io.millstream.v1.GenerateImageResponse>newBuilder()
              .setType(io.grpc.MethodDescriptor.MethodType.BIDI_STREAMING)
              .setFullMethodName(generateFullMethodName(SERVICE_NAME, "GenerateImage"))
              .setSampledToLocalTracing(true)
              .setRequestMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.millstream.v1.GenerateImageRequest.getDefaultInstance()))
              .setResponseMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.millstream.v1.GenerateImageResponse.getDefaultInstance()))
              .setSchemaDescriptor(new DiffusionServiceMethodDescriptorSupplier("GenerateImage"))
              .build();
        }
      }
    }
    return getGenerateImageMethod;
  }

  private static volatile io.grpc.MethodDescriptor<io.millstream.v1.GenerateVideoRequest,
      io.millstream.v1.GenerateVideoResponse> getGenerateVideoMethod;

  @io.grpc.stub.annotations.RpcMethod(
      fullMethodName = SERVICE_NAME + '/' + "GenerateVideo",
      requestType = io.millstream.v1.GenerateVideoRequest.class,
      responseType = io.millstream.v1.GenerateVideoResponse.class,
      methodType = io.grpc.MethodDescriptor.MethodType.BIDI_STREAMING)
  public static io.grpc.MethodDescriptor<io.millstream.v1.GenerateVideoRequest,
      io.millstream.v1.GenerateVideoResponse> getGenerateVideoMethod() {
    io.grpc.MethodDescriptor<io.millstream.v1.GenerateVideoRequest, io.millstream.v1.GenerateVideoResponse> getGenerateVideoMethod;
    if ((getGenerateVideoMethod = DiffusionServiceGrpc.getGenerateVideoMethod) == null) {
      synchronized (DiffusionServiceGrpc.class) {
        if ((getGenerateVideoMethod = DiffusionServiceGrpc.getGenerateVideoMethod) == null) {
          DiffusionServiceGrpc.getGenerateVideoMethod = getGenerateVideoMethod =
              io.grpc.MethodDescriptor.<io.millstream.v1.GenerateVideoRequest, io.millstream.v1.GenerateVideoResponse>newBuilder()
              .setType(io.grpc.MethodDescriptor.MethodType.BIDI_STREAMING)
              .setFullMethodName(generateFullMethodName(SERVICE_NAME, "GenerateVideo"))
              .setSampledToLocalTracing(true)
              .setRequestMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.millstream.v1.GenerateVideoRequest.getDefaultInstance()))
              .setResponseMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.millstream.v1.GenerateVideoResponse.getDefaultInstance()))
              .setSchemaDescriptor(new DiffusionServiceMethodDescriptorSupplier("GenerateVideo"))
              .build();
        }
      }
    }
    return getGenerateVideoMethod;
  }

  /**
   * Creates a new async stub that supports all call types for the service
   */
  public static DiffusionServiceStub newStub(io.grpc.Channel channel) {
    io.grpc.stub.AbstractStub.StubFactory<DiffusionServiceStub> factory =
      new io.grpc.stub.AbstractStub.StubFactory<DiffusionServiceStub>() {
        @java.lang.Override
        public DiffusionServiceStub newStub(io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
          return new DiffusionServiceStub(channel, callOptions);
        }
      };
    return DiffusionServiceStub.newStub(factory, channel);
  }

  /**
   * Creates a new blocking-style stub that supports unary and streaming output calls on the service
   */
  public static DiffusionServiceBlockingStub newBlockingStub(
      io.grpc.Channel channel) {
    io.grpc.stub.AbstractStub.StubFactory<DiffusionServiceBlockingStub> factory =
      new io.grpc.stub.AbstractStub.StubFactory<DiffusionServiceBlockingStub>() {
        @java.lang.Override
        public DiffusionServiceBlockingStub newStub(io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
          return new DiffusionServiceBlockingStub(channel, callOptions);
        }
      };
    return DiffusionServiceBlockingStub.newStub(factory, channel);
  }

  /**
   * Creates a new ListenableFuture-style stub that supports unary calls on the service
   */
  public static DiffusionServiceFutureStub newFutureStub(
      io.grpc.Channel channel) {
    io.grpc.stub.AbstractStub.StubFactory<DiffusionServiceFutureStub> factory =
      new io.grpc.stub.AbstractStub.StubFactory<DiffusionServiceFutureStub>() {
        @java.lang.Override
        public DiffusionServiceFutureStub newStub(io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
          return new DiffusionServiceFutureStub(channel, callOptions);
        }
      };
    return DiffusionServiceFutureStub.newStub(factory, channel);
  }

  /**
   * <pre>
   * DiffusionService generates with diffusion models: text, images, videos. DIFFUSION workers serve it,
   * and the Processor, which forwards to them: the same messages at both. A worker serves one of the
   * methods; at the others it ends the RPC with UNIMPLEMENTED, reason UNSUPPORTED_FEATURE, and the message
   * names the kind of worker that serves them.
   * </pre>
   */
  public static abstract class DiffusionServiceImplBase implements io.grpc.BindableService {

    /**
     * <pre>
     * GenerateText runs a diffusion language model. generation.proto states the rules, as for Decode;
     * tokens come in blocks, as they are denoised. Clients that have text rather than token ids use Chat
     * or Complete.
     * </pre>
     */
    public io.grpc.stub.StreamObserver<io.millstream.v1.GenerateTextRequest> generateText(
        io.grpc.stub.StreamObserver<io.millstream.v1.GenerateTextResponse> responseObserver) {
      return io.grpc.stub.ServerCalls.asyncUnimplementedStreamingCall(getGenerateTextMethod(), responseObserver);
    }

    /**
     * <pre>
     * GenerateImage carries any number of requests on one stream.
     * A request uses a *slot*, a number chosen by the caller. The caller MUST NOT reuse a slot before it
     * has received the slot's terminal entry: exactly one, in GenerateImageResponse.finished or .errors.
     * A request that fails ends neither the stream nor other requests.
     * Progress comes while a request waits and runs. It may be skipped: a message has only the latest of a
     * slot, and none once the slot has its terminal entry. So a caller MUST NOT wait for the last step's.
     * Chunks are never skipped. Those of one output come in order, the outputs one after another, each as
     * soon as it is made; all of them come before `finished`. Chunks of a request that fails later MUST be
     * discarded.
     * Requests run one after another on a worker's device, in the order of their arrival; one whose
     * input image is still being decoded holds up none of those behind it. All outputs of a request are
     * made before the next one runs. A cancel takes effect within one denoising step. When the caller
     * closes its side, open requests still end; when the RPC is cancelled, so are they.
     * </pre>
     */
    public io.grpc.stub.StreamObserver<io.millstream.v1.GenerateImageRequest> generateImage(
        io.grpc.stub.StreamObserver<io.millstream.v1.GenerateImageResponse> responseObserver) {
      return io.grpc.stub.ServerCalls.asyncUnimplementedStreamingCall(getGenerateImageMethod(), responseObserver);
    }

    /**
     * <pre>
     * GenerateVideo does the same for videos, by the same rules.
     * </pre>
     */
    public io.grpc.stub.StreamObserver<io.millstream.v1.GenerateVideoRequest> generateVideo(
        io.grpc.stub.StreamObserver<io.millstream.v1.GenerateVideoResponse> responseObserver) {
      return io.grpc.stub.ServerCalls.asyncUnimplementedStreamingCall(getGenerateVideoMethod(), responseObserver);
    }

    @java.lang.Override public final io.grpc.ServerServiceDefinition bindService() {
      return io.grpc.ServerServiceDefinition.builder(getServiceDescriptor())
          .addMethod(
            getGenerateTextMethod(),
            io.grpc.stub.ServerCalls.asyncBidiStreamingCall(
              new MethodHandlers<
                io.millstream.v1.GenerateTextRequest,
                io.millstream.v1.GenerateTextResponse>(
                  this, METHODID_GENERATE_TEXT)))
          .addMethod(
            getGenerateImageMethod(),
            io.grpc.stub.ServerCalls.asyncBidiStreamingCall(
              new MethodHandlers<
                io.millstream.v1.GenerateImageRequest,
                io.millstream.v1.GenerateImageResponse>(
                  this, METHODID_GENERATE_IMAGE)))
          .addMethod(
            getGenerateVideoMethod(),
            io.grpc.stub.ServerCalls.asyncBidiStreamingCall(
              new MethodHandlers<
                io.millstream.v1.GenerateVideoRequest,
                io.millstream.v1.GenerateVideoResponse>(
                  this, METHODID_GENERATE_VIDEO)))
          .build();
    }
  }

  /**
   * <pre>
   * DiffusionService generates with diffusion models: text, images, videos. DIFFUSION workers serve it,
   * and the Processor, which forwards to them: the same messages at both. A worker serves one of the
   * methods; at the others it ends the RPC with UNIMPLEMENTED, reason UNSUPPORTED_FEATURE, and the message
   * names the kind of worker that serves them.
   * </pre>
   */
  public static final class DiffusionServiceStub extends io.grpc.stub.AbstractAsyncStub<DiffusionServiceStub> {
    private DiffusionServiceStub(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      super(channel, callOptions);
    }

    @java.lang.Override
    protected DiffusionServiceStub build(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      return new DiffusionServiceStub(channel, callOptions);
    }

    /**
     * <pre>
     * GenerateText runs a diffusion language model. generation.proto states the rules, as for Decode;
     * tokens come in blocks, as they are denoised. Clients that have text rather than token ids use Chat
     * or Complete.
     * </pre>
     */
    public io.grpc.stub.StreamObserver<io.millstream.v1.GenerateTextRequest> generateText(
        io.grpc.stub.StreamObserver<io.millstream.v1.GenerateTextResponse> responseObserver) {
      return io.grpc.stub.ClientCalls.asyncBidiStreamingCall(
          getChannel().newCall(getGenerateTextMethod(), getCallOptions()), responseObserver);
    }

    /**
     * <pre>
     * GenerateImage carries any number of requests on one stream.
     * A request uses a *slot*, a number chosen by the caller. The caller MUST NOT reuse a slot before it
     * has received the slot's terminal entry: exactly one, in GenerateImageResponse.finished or .errors.
     * A request that fails ends neither the stream nor other requests.
     * Progress comes while a request waits and runs. It may be skipped: a message has only the latest of a
     * slot, and none once the slot has its terminal entry. So a caller MUST NOT wait for the last step's.
     * Chunks are never skipped. Those of one output come in order, the outputs one after another, each as
     * soon as it is made; all of them come before `finished`. Chunks of a request that fails later MUST be
     * discarded.
     * Requests run one after another on a worker's device, in the order of their arrival; one whose
     * input image is still being decoded holds up none of those behind it. All outputs of a request are
     * made before the next one runs. A cancel takes effect within one denoising step. When the caller
     * closes its side, open requests still end; when the RPC is cancelled, so are they.
     * </pre>
     */
    public io.grpc.stub.StreamObserver<io.millstream.v1.GenerateImageRequest> generateImage(
        io.grpc.stub.StreamObserver<io.millstream.v1.GenerateImageResponse> responseObserver) {
      return io.grpc.stub.ClientCalls.asyncBidiStreamingCall(
          getChannel().newCall(getGenerateImageMethod(), getCallOptions()), responseObserver);
    }

    /**
     * <pre>
     * GenerateVideo does the same for videos, by the same rules.
     * </pre>
     */
    public io.grpc.stub.StreamObserver<io.millstream.v1.GenerateVideoRequest> generateVideo(
        io.grpc.stub.StreamObserver<io.millstream.v1.GenerateVideoResponse> responseObserver) {
      return io.grpc.stub.ClientCalls.asyncBidiStreamingCall(
          getChannel().newCall(getGenerateVideoMethod(), getCallOptions()), responseObserver);
    }
  }

  /**
   * <pre>
   * DiffusionService generates with diffusion models: text, images, videos. DIFFUSION workers serve it,
   * and the Processor, which forwards to them: the same messages at both. A worker serves one of the
   * methods; at the others it ends the RPC with UNIMPLEMENTED, reason UNSUPPORTED_FEATURE, and the message
   * names the kind of worker that serves them.
   * </pre>
   */
  public static final class DiffusionServiceBlockingStub extends io.grpc.stub.AbstractBlockingStub<DiffusionServiceBlockingStub> {
    private DiffusionServiceBlockingStub(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      super(channel, callOptions);
    }

    @java.lang.Override
    protected DiffusionServiceBlockingStub build(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      return new DiffusionServiceBlockingStub(channel, callOptions);
    }
  }

  /**
   * <pre>
   * DiffusionService generates with diffusion models: text, images, videos. DIFFUSION workers serve it,
   * and the Processor, which forwards to them: the same messages at both. A worker serves one of the
   * methods; at the others it ends the RPC with UNIMPLEMENTED, reason UNSUPPORTED_FEATURE, and the message
   * names the kind of worker that serves them.
   * </pre>
   */
  public static final class DiffusionServiceFutureStub extends io.grpc.stub.AbstractFutureStub<DiffusionServiceFutureStub> {
    private DiffusionServiceFutureStub(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      super(channel, callOptions);
    }

    @java.lang.Override
    protected DiffusionServiceFutureStub build(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      return new DiffusionServiceFutureStub(channel, callOptions);
    }
  }

  private static final int METHODID_GENERATE_TEXT = 0;
  private static final int METHODID_GENERATE_IMAGE = 1;
  private static final int METHODID_GENERATE_VIDEO = 2;

  private static final class MethodHandlers<Req, Resp> implements
      io.grpc.stub.ServerCalls.UnaryMethod<Req, Resp>,
      io.grpc.stub.ServerCalls.ServerStreamingMethod<Req, Resp>,
      io.grpc.stub.ServerCalls.ClientStreamingMethod<Req, Resp>,
      io.grpc.stub.ServerCalls.BidiStreamingMethod<Req, Resp> {
    private final DiffusionServiceImplBase serviceImpl;
    private final int methodId;

    MethodHandlers(DiffusionServiceImplBase serviceImpl, int methodId) {
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
        case METHODID_GENERATE_TEXT:
          return (io.grpc.stub.StreamObserver<Req>) serviceImpl.generateText(
              (io.grpc.stub.StreamObserver<io.millstream.v1.GenerateTextResponse>) responseObserver);
        case METHODID_GENERATE_IMAGE:
          return (io.grpc.stub.StreamObserver<Req>) serviceImpl.generateImage(
              (io.grpc.stub.StreamObserver<io.millstream.v1.GenerateImageResponse>) responseObserver);
        case METHODID_GENERATE_VIDEO:
          return (io.grpc.stub.StreamObserver<Req>) serviceImpl.generateVideo(
              (io.grpc.stub.StreamObserver<io.millstream.v1.GenerateVideoResponse>) responseObserver);
        default:
          throw new AssertionError();
      }
    }
  }

  private static abstract class DiffusionServiceBaseDescriptorSupplier
      implements io.grpc.protobuf.ProtoFileDescriptorSupplier, io.grpc.protobuf.ProtoServiceDescriptorSupplier {
    DiffusionServiceBaseDescriptorSupplier() {}

    @java.lang.Override
    public com.google.protobuf.Descriptors.FileDescriptor getFileDescriptor() {
      return io.millstream.v1.DiffusionProto.getDescriptor();
    }

    @java.lang.Override
    public com.google.protobuf.Descriptors.ServiceDescriptor getServiceDescriptor() {
      return getFileDescriptor().findServiceByName("DiffusionService");
    }
  }

  private static final class DiffusionServiceFileDescriptorSupplier
      extends DiffusionServiceBaseDescriptorSupplier {
    DiffusionServiceFileDescriptorSupplier() {}
  }

  private static final class DiffusionServiceMethodDescriptorSupplier
      extends DiffusionServiceBaseDescriptorSupplier
      implements io.grpc.protobuf.ProtoMethodDescriptorSupplier {
    private final String methodName;

    DiffusionServiceMethodDescriptorSupplier(String methodName) {
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
      synchronized (DiffusionServiceGrpc.class) {
        result = serviceDescriptor;
        if (result == null) {
          serviceDescriptor = result = io.grpc.ServiceDescriptor.newBuilder(SERVICE_NAME)
              .setSchemaDescriptor(new DiffusionServiceFileDescriptorSupplier())
              .addMethod(getGenerateTextMethod())
              .addMethod(getGenerateImageMethod())
              .addMethod(getGenerateVideoMethod())
              .build();
        }
      }
    }
    return result;
  }
}
