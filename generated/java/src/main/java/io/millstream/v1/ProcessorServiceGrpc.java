package io.millstream.v1;

import static io.grpc.MethodDescriptor.generateFullMethodName;

/**
 * <pre>
 * ProcessorService serves clients, in text. Failures are the RPC's status, with
 * google.rpc.ErrorInfo (domain "millstream.io", reason from ErrorReason, metadata `retryable` "true" or
 * "false" and, for INTERNAL, `error_id`), google.rpc.BadRequest for invalid input and
 * google.rpc.RetryInfo if a retry may succeed. A message above the server's size limit ends with
 * gRPC's own RESOURCE_EXHAUSTED, without details.
 * Without free capacity a turn waits in a queue. It is refused with RESOURCE_EXHAUSTED (OVERLOADED)
 * if the queue is full, or if it would wait beyond the RPC's deadline; a client MUST NOT retry before
 * RetryInfo's delay. A cancel, by message or by RPC, removes a waiting turn at once.
 * </pre>
 */
@io.grpc.stub.annotations.GrpcGenerated
public final class ProcessorServiceGrpc {

  private ProcessorServiceGrpc() {}

  public static final String SERVICE_NAME = "millstream.v1.ProcessorService";

  // Static method descriptors that strictly reflect the proto.
  private static volatile io.grpc.MethodDescriptor<io.millstream.v1.ChatRequest,
      io.millstream.v1.ChatResponse> getChatMethod;

  @io.grpc.stub.annotations.RpcMethod(
      fullMethodName = SERVICE_NAME + '/' + "Chat",
      requestType = io.millstream.v1.ChatRequest.class,
      responseType = io.millstream.v1.ChatResponse.class,
      methodType = io.grpc.MethodDescriptor.MethodType.BIDI_STREAMING)
  public static io.grpc.MethodDescriptor<io.millstream.v1.ChatRequest,
      io.millstream.v1.ChatResponse> getChatMethod() {
    io.grpc.MethodDescriptor<io.millstream.v1.ChatRequest, io.millstream.v1.ChatResponse> getChatMethod;
    if ((getChatMethod = ProcessorServiceGrpc.getChatMethod) == null) {
      synchronized (ProcessorServiceGrpc.class) {
        if ((getChatMethod = ProcessorServiceGrpc.getChatMethod) == null) {
          ProcessorServiceGrpc.getChatMethod = getChatMethod =
              io.grpc.MethodDescriptor.<io.millstream.v1.ChatRequest, io.millstream.v1.ChatResponse>newBuilder()
              .setType(io.grpc.MethodDescriptor.MethodType.BIDI_STREAMING)
              .setFullMethodName(generateFullMethodName(SERVICE_NAME, "Chat"))
              .setSampledToLocalTracing(true)
              .setRequestMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.millstream.v1.ChatRequest.getDefaultInstance()))
              .setResponseMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.millstream.v1.ChatResponse.getDefaultInstance()))
              .setSchemaDescriptor(new ProcessorServiceMethodDescriptorSupplier("Chat"))
              .build();
        }
      }
    }
    return getChatMethod;
  }

  private static volatile io.grpc.MethodDescriptor<io.millstream.v1.CompleteRequest,
      io.millstream.v1.CompleteResponse> getCompleteMethod;

  @io.grpc.stub.annotations.RpcMethod(
      fullMethodName = SERVICE_NAME + '/' + "Complete",
      requestType = io.millstream.v1.CompleteRequest.class,
      responseType = io.millstream.v1.CompleteResponse.class,
      methodType = io.grpc.MethodDescriptor.MethodType.SERVER_STREAMING)
  public static io.grpc.MethodDescriptor<io.millstream.v1.CompleteRequest,
      io.millstream.v1.CompleteResponse> getCompleteMethod() {
    io.grpc.MethodDescriptor<io.millstream.v1.CompleteRequest, io.millstream.v1.CompleteResponse> getCompleteMethod;
    if ((getCompleteMethod = ProcessorServiceGrpc.getCompleteMethod) == null) {
      synchronized (ProcessorServiceGrpc.class) {
        if ((getCompleteMethod = ProcessorServiceGrpc.getCompleteMethod) == null) {
          ProcessorServiceGrpc.getCompleteMethod = getCompleteMethod =
              io.grpc.MethodDescriptor.<io.millstream.v1.CompleteRequest, io.millstream.v1.CompleteResponse>newBuilder()
              .setType(io.grpc.MethodDescriptor.MethodType.SERVER_STREAMING)
              .setFullMethodName(generateFullMethodName(SERVICE_NAME, "Complete"))
              .setSampledToLocalTracing(true)
              .setRequestMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.millstream.v1.CompleteRequest.getDefaultInstance()))
              .setResponseMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.millstream.v1.CompleteResponse.getDefaultInstance()))
              .setSchemaDescriptor(new ProcessorServiceMethodDescriptorSupplier("Complete"))
              .build();
        }
      }
    }
    return getCompleteMethod;
  }

  private static volatile io.grpc.MethodDescriptor<io.millstream.v1.TokenizeRequest,
      io.millstream.v1.TokenizeResponse> getTokenizeMethod;

  @io.grpc.stub.annotations.RpcMethod(
      fullMethodName = SERVICE_NAME + '/' + "Tokenize",
      requestType = io.millstream.v1.TokenizeRequest.class,
      responseType = io.millstream.v1.TokenizeResponse.class,
      methodType = io.grpc.MethodDescriptor.MethodType.UNARY)
  public static io.grpc.MethodDescriptor<io.millstream.v1.TokenizeRequest,
      io.millstream.v1.TokenizeResponse> getTokenizeMethod() {
    io.grpc.MethodDescriptor<io.millstream.v1.TokenizeRequest, io.millstream.v1.TokenizeResponse> getTokenizeMethod;
    if ((getTokenizeMethod = ProcessorServiceGrpc.getTokenizeMethod) == null) {
      synchronized (ProcessorServiceGrpc.class) {
        if ((getTokenizeMethod = ProcessorServiceGrpc.getTokenizeMethod) == null) {
          ProcessorServiceGrpc.getTokenizeMethod = getTokenizeMethod =
              io.grpc.MethodDescriptor.<io.millstream.v1.TokenizeRequest, io.millstream.v1.TokenizeResponse>newBuilder()
              .setType(io.grpc.MethodDescriptor.MethodType.UNARY)
              .setFullMethodName(generateFullMethodName(SERVICE_NAME, "Tokenize"))
              .setSampledToLocalTracing(true)
              .setRequestMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.millstream.v1.TokenizeRequest.getDefaultInstance()))
              .setResponseMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.millstream.v1.TokenizeResponse.getDefaultInstance()))
              .setSchemaDescriptor(new ProcessorServiceMethodDescriptorSupplier("Tokenize"))
              .build();
        }
      }
    }
    return getTokenizeMethod;
  }

  private static volatile io.grpc.MethodDescriptor<io.millstream.v1.DetokenizeRequest,
      io.millstream.v1.DetokenizeResponse> getDetokenizeMethod;

  @io.grpc.stub.annotations.RpcMethod(
      fullMethodName = SERVICE_NAME + '/' + "Detokenize",
      requestType = io.millstream.v1.DetokenizeRequest.class,
      responseType = io.millstream.v1.DetokenizeResponse.class,
      methodType = io.grpc.MethodDescriptor.MethodType.UNARY)
  public static io.grpc.MethodDescriptor<io.millstream.v1.DetokenizeRequest,
      io.millstream.v1.DetokenizeResponse> getDetokenizeMethod() {
    io.grpc.MethodDescriptor<io.millstream.v1.DetokenizeRequest, io.millstream.v1.DetokenizeResponse> getDetokenizeMethod;
    if ((getDetokenizeMethod = ProcessorServiceGrpc.getDetokenizeMethod) == null) {
      synchronized (ProcessorServiceGrpc.class) {
        if ((getDetokenizeMethod = ProcessorServiceGrpc.getDetokenizeMethod) == null) {
          ProcessorServiceGrpc.getDetokenizeMethod = getDetokenizeMethod =
              io.grpc.MethodDescriptor.<io.millstream.v1.DetokenizeRequest, io.millstream.v1.DetokenizeResponse>newBuilder()
              .setType(io.grpc.MethodDescriptor.MethodType.UNARY)
              .setFullMethodName(generateFullMethodName(SERVICE_NAME, "Detokenize"))
              .setSampledToLocalTracing(true)
              .setRequestMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.millstream.v1.DetokenizeRequest.getDefaultInstance()))
              .setResponseMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.millstream.v1.DetokenizeResponse.getDefaultInstance()))
              .setSchemaDescriptor(new ProcessorServiceMethodDescriptorSupplier("Detokenize"))
              .build();
        }
      }
    }
    return getDetokenizeMethod;
  }

  private static volatile io.grpc.MethodDescriptor<io.millstream.v1.ListModelsRequest,
      io.millstream.v1.ListModelsResponse> getListModelsMethod;

  @io.grpc.stub.annotations.RpcMethod(
      fullMethodName = SERVICE_NAME + '/' + "ListModels",
      requestType = io.millstream.v1.ListModelsRequest.class,
      responseType = io.millstream.v1.ListModelsResponse.class,
      methodType = io.grpc.MethodDescriptor.MethodType.UNARY)
  public static io.grpc.MethodDescriptor<io.millstream.v1.ListModelsRequest,
      io.millstream.v1.ListModelsResponse> getListModelsMethod() {
    io.grpc.MethodDescriptor<io.millstream.v1.ListModelsRequest, io.millstream.v1.ListModelsResponse> getListModelsMethod;
    if ((getListModelsMethod = ProcessorServiceGrpc.getListModelsMethod) == null) {
      synchronized (ProcessorServiceGrpc.class) {
        if ((getListModelsMethod = ProcessorServiceGrpc.getListModelsMethod) == null) {
          ProcessorServiceGrpc.getListModelsMethod = getListModelsMethod =
              io.grpc.MethodDescriptor.<io.millstream.v1.ListModelsRequest, io.millstream.v1.ListModelsResponse>newBuilder()
              .setType(io.grpc.MethodDescriptor.MethodType.UNARY)
              .setFullMethodName(generateFullMethodName(SERVICE_NAME, "ListModels"))
              .setSampledToLocalTracing(true)
              .setRequestMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.millstream.v1.ListModelsRequest.getDefaultInstance()))
              .setResponseMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.millstream.v1.ListModelsResponse.getDefaultInstance()))
              .setSchemaDescriptor(new ProcessorServiceMethodDescriptorSupplier("ListModels"))
              .build();
        }
      }
    }
    return getListModelsMethod;
  }

  /**
   * Creates a new async stub that supports all call types for the service
   */
  public static ProcessorServiceStub newStub(io.grpc.Channel channel) {
    io.grpc.stub.AbstractStub.StubFactory<ProcessorServiceStub> factory =
      new io.grpc.stub.AbstractStub.StubFactory<ProcessorServiceStub>() {
        @java.lang.Override
        public ProcessorServiceStub newStub(io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
          return new ProcessorServiceStub(channel, callOptions);
        }
      };
    return ProcessorServiceStub.newStub(factory, channel);
  }

  /**
   * Creates a new blocking-style stub that supports unary and streaming output calls on the service
   */
  public static ProcessorServiceBlockingStub newBlockingStub(
      io.grpc.Channel channel) {
    io.grpc.stub.AbstractStub.StubFactory<ProcessorServiceBlockingStub> factory =
      new io.grpc.stub.AbstractStub.StubFactory<ProcessorServiceBlockingStub>() {
        @java.lang.Override
        public ProcessorServiceBlockingStub newStub(io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
          return new ProcessorServiceBlockingStub(channel, callOptions);
        }
      };
    return ProcessorServiceBlockingStub.newStub(factory, channel);
  }

  /**
   * Creates a new ListenableFuture-style stub that supports unary calls on the service
   */
  public static ProcessorServiceFutureStub newFutureStub(
      io.grpc.Channel channel) {
    io.grpc.stub.AbstractStub.StubFactory<ProcessorServiceFutureStub> factory =
      new io.grpc.stub.AbstractStub.StubFactory<ProcessorServiceFutureStub>() {
        @java.lang.Override
        public ProcessorServiceFutureStub newStub(io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
          return new ProcessorServiceFutureStub(channel, callOptions);
        }
      };
    return ProcessorServiceFutureStub.newStub(factory, channel);
  }

  /**
   * <pre>
   * ProcessorService serves clients, in text. Failures are the RPC's status, with
   * google.rpc.ErrorInfo (domain "millstream.io", reason from ErrorReason, metadata `retryable` "true" or
   * "false" and, for INTERNAL, `error_id`), google.rpc.BadRequest for invalid input and
   * google.rpc.RetryInfo if a retry may succeed. A message above the server's size limit ends with
   * gRPC's own RESOURCE_EXHAUSTED, without details.
   * Without free capacity a turn waits in a queue. It is refused with RESOURCE_EXHAUSTED (OVERLOADED)
   * if the queue is full, or if it would wait beyond the RPC's deadline; a client MUST NOT retry before
   * RetryInfo's delay. A cancel, by message or by RPC, removes a waiting turn at once.
   * </pre>
   */
  public static abstract class ProcessorServiceImplBase implements io.grpc.BindableService {

    /**
     * <pre>
     * Chat is one conversation per stream. The first message but for media chunks MUST be `start`; it
     * starts the first turn.
     * After a turn has finished, `user_turn` or `tool_results` starts the next one, with all messages so
     * far as its context; sent earlier, they wait for the running turn. `cancel` stops the running turn,
     * which then finishes with FINISH_REASON_CANCELLED; what it has generated stays in the context.
     * When the server shuts down, it sends `draining`: at once between two turns, else with the running
     * turn's next message. Turns received before still run; a client SHOULD close its side when they have
     * finished, and go on in a new call, with its own context. One that doesn't close its side within a
     * second gets UNAVAILABLE.
     * After the client closes its side, waiting turns still run, then the stream ends: one message and
     * a half-close make a single request.
     * </pre>
     */
    public io.grpc.stub.StreamObserver<io.millstream.v1.ChatRequest> chat(
        io.grpc.stub.StreamObserver<io.millstream.v1.ChatResponse> responseObserver) {
      return io.grpc.stub.ServerCalls.asyncUnimplementedStreamingCall(getChatMethod(), responseObserver);
    }

    /**
     * <pre>
     * Complete continues a raw prompt, without a chat template.
     * </pre>
     */
    public void complete(io.millstream.v1.CompleteRequest request,
        io.grpc.stub.StreamObserver<io.millstream.v1.CompleteResponse> responseObserver) {
      io.grpc.stub.ServerCalls.asyncUnimplementedUnaryCall(getCompleteMethod(), responseObserver);
    }

    /**
     * <pre>
     * Tokenize turns text, or a conversation through the model's chat template, into token ids. If the
     * response would be larger than 4 MiB, the most that clients take unless told otherwise, it fails with
     * INVALID_ARGUMENT.
     * </pre>
     */
    public void tokenize(io.millstream.v1.TokenizeRequest request,
        io.grpc.stub.StreamObserver<io.millstream.v1.TokenizeResponse> responseObserver) {
      io.grpc.stub.ServerCalls.asyncUnimplementedUnaryCall(getTokenizeMethod(), responseObserver);
    }

    /**
     * <pre>
     * Detokenize turns token ids into text; its response is bounded in the same way.
     * </pre>
     */
    public void detokenize(io.millstream.v1.DetokenizeRequest request,
        io.grpc.stub.StreamObserver<io.millstream.v1.DetokenizeResponse> responseObserver) {
      io.grpc.stub.ServerCalls.asyncUnimplementedUnaryCall(getDetokenizeMethod(), responseObserver);
    }

    /**
     * <pre>
     * ListModels lists the served models, and whether each has all the workers it needs.
     * </pre>
     */
    public void listModels(io.millstream.v1.ListModelsRequest request,
        io.grpc.stub.StreamObserver<io.millstream.v1.ListModelsResponse> responseObserver) {
      io.grpc.stub.ServerCalls.asyncUnimplementedUnaryCall(getListModelsMethod(), responseObserver);
    }

    @java.lang.Override public final io.grpc.ServerServiceDefinition bindService() {
      return io.grpc.ServerServiceDefinition.builder(getServiceDescriptor())
          .addMethod(
            getChatMethod(),
            io.grpc.stub.ServerCalls.asyncBidiStreamingCall(
              new MethodHandlers<
                io.millstream.v1.ChatRequest,
                io.millstream.v1.ChatResponse>(
                  this, METHODID_CHAT)))
          .addMethod(
            getCompleteMethod(),
            io.grpc.stub.ServerCalls.asyncServerStreamingCall(
              new MethodHandlers<
                io.millstream.v1.CompleteRequest,
                io.millstream.v1.CompleteResponse>(
                  this, METHODID_COMPLETE)))
          .addMethod(
            getTokenizeMethod(),
            io.grpc.stub.ServerCalls.asyncUnaryCall(
              new MethodHandlers<
                io.millstream.v1.TokenizeRequest,
                io.millstream.v1.TokenizeResponse>(
                  this, METHODID_TOKENIZE)))
          .addMethod(
            getDetokenizeMethod(),
            io.grpc.stub.ServerCalls.asyncUnaryCall(
              new MethodHandlers<
                io.millstream.v1.DetokenizeRequest,
                io.millstream.v1.DetokenizeResponse>(
                  this, METHODID_DETOKENIZE)))
          .addMethod(
            getListModelsMethod(),
            io.grpc.stub.ServerCalls.asyncUnaryCall(
              new MethodHandlers<
                io.millstream.v1.ListModelsRequest,
                io.millstream.v1.ListModelsResponse>(
                  this, METHODID_LIST_MODELS)))
          .build();
    }
  }

  /**
   * <pre>
   * ProcessorService serves clients, in text. Failures are the RPC's status, with
   * google.rpc.ErrorInfo (domain "millstream.io", reason from ErrorReason, metadata `retryable` "true" or
   * "false" and, for INTERNAL, `error_id`), google.rpc.BadRequest for invalid input and
   * google.rpc.RetryInfo if a retry may succeed. A message above the server's size limit ends with
   * gRPC's own RESOURCE_EXHAUSTED, without details.
   * Without free capacity a turn waits in a queue. It is refused with RESOURCE_EXHAUSTED (OVERLOADED)
   * if the queue is full, or if it would wait beyond the RPC's deadline; a client MUST NOT retry before
   * RetryInfo's delay. A cancel, by message or by RPC, removes a waiting turn at once.
   * </pre>
   */
  public static final class ProcessorServiceStub extends io.grpc.stub.AbstractAsyncStub<ProcessorServiceStub> {
    private ProcessorServiceStub(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      super(channel, callOptions);
    }

    @java.lang.Override
    protected ProcessorServiceStub build(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      return new ProcessorServiceStub(channel, callOptions);
    }

    /**
     * <pre>
     * Chat is one conversation per stream. The first message but for media chunks MUST be `start`; it
     * starts the first turn.
     * After a turn has finished, `user_turn` or `tool_results` starts the next one, with all messages so
     * far as its context; sent earlier, they wait for the running turn. `cancel` stops the running turn,
     * which then finishes with FINISH_REASON_CANCELLED; what it has generated stays in the context.
     * When the server shuts down, it sends `draining`: at once between two turns, else with the running
     * turn's next message. Turns received before still run; a client SHOULD close its side when they have
     * finished, and go on in a new call, with its own context. One that doesn't close its side within a
     * second gets UNAVAILABLE.
     * After the client closes its side, waiting turns still run, then the stream ends: one message and
     * a half-close make a single request.
     * </pre>
     */
    public io.grpc.stub.StreamObserver<io.millstream.v1.ChatRequest> chat(
        io.grpc.stub.StreamObserver<io.millstream.v1.ChatResponse> responseObserver) {
      return io.grpc.stub.ClientCalls.asyncBidiStreamingCall(
          getChannel().newCall(getChatMethod(), getCallOptions()), responseObserver);
    }

    /**
     * <pre>
     * Complete continues a raw prompt, without a chat template.
     * </pre>
     */
    public void complete(io.millstream.v1.CompleteRequest request,
        io.grpc.stub.StreamObserver<io.millstream.v1.CompleteResponse> responseObserver) {
      io.grpc.stub.ClientCalls.asyncServerStreamingCall(
          getChannel().newCall(getCompleteMethod(), getCallOptions()), request, responseObserver);
    }

    /**
     * <pre>
     * Tokenize turns text, or a conversation through the model's chat template, into token ids. If the
     * response would be larger than 4 MiB, the most that clients take unless told otherwise, it fails with
     * INVALID_ARGUMENT.
     * </pre>
     */
    public void tokenize(io.millstream.v1.TokenizeRequest request,
        io.grpc.stub.StreamObserver<io.millstream.v1.TokenizeResponse> responseObserver) {
      io.grpc.stub.ClientCalls.asyncUnaryCall(
          getChannel().newCall(getTokenizeMethod(), getCallOptions()), request, responseObserver);
    }

    /**
     * <pre>
     * Detokenize turns token ids into text; its response is bounded in the same way.
     * </pre>
     */
    public void detokenize(io.millstream.v1.DetokenizeRequest request,
        io.grpc.stub.StreamObserver<io.millstream.v1.DetokenizeResponse> responseObserver) {
      io.grpc.stub.ClientCalls.asyncUnaryCall(
          getChannel().newCall(getDetokenizeMethod(), getCallOptions()), request, responseObserver);
    }

    /**
     * <pre>
     * ListModels lists the served models, and whether each has all the workers it needs.
     * </pre>
     */
    public void listModels(io.millstream.v1.ListModelsRequest request,
        io.grpc.stub.StreamObserver<io.millstream.v1.ListModelsResponse> responseObserver) {
      io.grpc.stub.ClientCalls.asyncUnaryCall(
          getChannel().newCall(getListModelsMethod(), getCallOptions()), request, responseObserver);
    }
  }

  /**
   * <pre>
   * ProcessorService serves clients, in text. Failures are the RPC's status, with
   * google.rpc.ErrorInfo (domain "millstream.io", reason from ErrorReason, metadata `retryable` "true" or
   * "false" and, for INTERNAL, `error_id`), google.rpc.BadRequest for invalid input and
   * google.rpc.RetryInfo if a retry may succeed. A message above the server's size limit ends with
   * gRPC's own RESOURCE_EXHAUSTED, without details.
   * Without free capacity a turn waits in a queue. It is refused with RESOURCE_EXHAUSTED (OVERLOADED)
   * if the queue is full, or if it would wait beyond the RPC's deadline; a client MUST NOT retry before
   * RetryInfo's delay. A cancel, by message or by RPC, removes a waiting turn at once.
   * </pre>
   */
  public static final class ProcessorServiceBlockingStub extends io.grpc.stub.AbstractBlockingStub<ProcessorServiceBlockingStub> {
    private ProcessorServiceBlockingStub(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      super(channel, callOptions);
    }

    @java.lang.Override
    protected ProcessorServiceBlockingStub build(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      return new ProcessorServiceBlockingStub(channel, callOptions);
    }

    /**
     * <pre>
     * Complete continues a raw prompt, without a chat template.
     * </pre>
     */
    public java.util.Iterator<io.millstream.v1.CompleteResponse> complete(
        io.millstream.v1.CompleteRequest request) {
      return io.grpc.stub.ClientCalls.blockingServerStreamingCall(
          getChannel(), getCompleteMethod(), getCallOptions(), request);
    }

    /**
     * <pre>
     * Tokenize turns text, or a conversation through the model's chat template, into token ids. If the
     * response would be larger than 4 MiB, the most that clients take unless told otherwise, it fails with
     * INVALID_ARGUMENT.
     * </pre>
     */
    public io.millstream.v1.TokenizeResponse tokenize(io.millstream.v1.TokenizeRequest request) {
      return io.grpc.stub.ClientCalls.blockingUnaryCall(
          getChannel(), getTokenizeMethod(), getCallOptions(), request);
    }

    /**
     * <pre>
     * Detokenize turns token ids into text; its response is bounded in the same way.
     * </pre>
     */
    public io.millstream.v1.DetokenizeResponse detokenize(io.millstream.v1.DetokenizeRequest request) {
      return io.grpc.stub.ClientCalls.blockingUnaryCall(
          getChannel(), getDetokenizeMethod(), getCallOptions(), request);
    }

    /**
     * <pre>
     * ListModels lists the served models, and whether each has all the workers it needs.
     * </pre>
     */
    public io.millstream.v1.ListModelsResponse listModels(io.millstream.v1.ListModelsRequest request) {
      return io.grpc.stub.ClientCalls.blockingUnaryCall(
          getChannel(), getListModelsMethod(), getCallOptions(), request);
    }
  }

  /**
   * <pre>
   * ProcessorService serves clients, in text. Failures are the RPC's status, with
   * google.rpc.ErrorInfo (domain "millstream.io", reason from ErrorReason, metadata `retryable` "true" or
   * "false" and, for INTERNAL, `error_id`), google.rpc.BadRequest for invalid input and
   * google.rpc.RetryInfo if a retry may succeed. A message above the server's size limit ends with
   * gRPC's own RESOURCE_EXHAUSTED, without details.
   * Without free capacity a turn waits in a queue. It is refused with RESOURCE_EXHAUSTED (OVERLOADED)
   * if the queue is full, or if it would wait beyond the RPC's deadline; a client MUST NOT retry before
   * RetryInfo's delay. A cancel, by message or by RPC, removes a waiting turn at once.
   * </pre>
   */
  public static final class ProcessorServiceFutureStub extends io.grpc.stub.AbstractFutureStub<ProcessorServiceFutureStub> {
    private ProcessorServiceFutureStub(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      super(channel, callOptions);
    }

    @java.lang.Override
    protected ProcessorServiceFutureStub build(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      return new ProcessorServiceFutureStub(channel, callOptions);
    }

    /**
     * <pre>
     * Tokenize turns text, or a conversation through the model's chat template, into token ids. If the
     * response would be larger than 4 MiB, the most that clients take unless told otherwise, it fails with
     * INVALID_ARGUMENT.
     * </pre>
     */
    public com.google.common.util.concurrent.ListenableFuture<io.millstream.v1.TokenizeResponse> tokenize(
        io.millstream.v1.TokenizeRequest request) {
      return io.grpc.stub.ClientCalls.futureUnaryCall(
          getChannel().newCall(getTokenizeMethod(), getCallOptions()), request);
    }

    /**
     * <pre>
     * Detokenize turns token ids into text; its response is bounded in the same way.
     * </pre>
     */
    public com.google.common.util.concurrent.ListenableFuture<io.millstream.v1.DetokenizeResponse> detokenize(
        io.millstream.v1.DetokenizeRequest request) {
      return io.grpc.stub.ClientCalls.futureUnaryCall(
          getChannel().newCall(getDetokenizeMethod(), getCallOptions()), request);
    }

    /**
     * <pre>
     * ListModels lists the served models, and whether each has all the workers it needs.
     * </pre>
     */
    public com.google.common.util.concurrent.ListenableFuture<io.millstream.v1.ListModelsResponse> listModels(
        io.millstream.v1.ListModelsRequest request) {
      return io.grpc.stub.ClientCalls.futureUnaryCall(
          getChannel().newCall(getListModelsMethod(), getCallOptions()), request);
    }
  }

  private static final int METHODID_COMPLETE = 0;
  private static final int METHODID_TOKENIZE = 1;
  private static final int METHODID_DETOKENIZE = 2;
  private static final int METHODID_LIST_MODELS = 3;
  private static final int METHODID_CHAT = 4;

  private static final class MethodHandlers<Req, Resp> implements
      io.grpc.stub.ServerCalls.UnaryMethod<Req, Resp>,
      io.grpc.stub.ServerCalls.ServerStreamingMethod<Req, Resp>,
      io.grpc.stub.ServerCalls.ClientStreamingMethod<Req, Resp>,
      io.grpc.stub.ServerCalls.BidiStreamingMethod<Req, Resp> {
    private final ProcessorServiceImplBase serviceImpl;
    private final int methodId;

    MethodHandlers(ProcessorServiceImplBase serviceImpl, int methodId) {
      this.serviceImpl = serviceImpl;
      this.methodId = methodId;
    }

    @java.lang.Override
    @java.lang.SuppressWarnings("unchecked")
    public void invoke(Req request, io.grpc.stub.StreamObserver<Resp> responseObserver) {
      switch (methodId) {
        case METHODID_COMPLETE:
          serviceImpl.complete((io.millstream.v1.CompleteRequest) request,
              (io.grpc.stub.StreamObserver<io.millstream.v1.CompleteResponse>) responseObserver);
          break;
        case METHODID_TOKENIZE:
          serviceImpl.tokenize((io.millstream.v1.TokenizeRequest) request,
              (io.grpc.stub.StreamObserver<io.millstream.v1.TokenizeResponse>) responseObserver);
          break;
        case METHODID_DETOKENIZE:
          serviceImpl.detokenize((io.millstream.v1.DetokenizeRequest) request,
              (io.grpc.stub.StreamObserver<io.millstream.v1.DetokenizeResponse>) responseObserver);
          break;
        case METHODID_LIST_MODELS:
          serviceImpl.listModels((io.millstream.v1.ListModelsRequest) request,
              (io.grpc.stub.StreamObserver<io.millstream.v1.ListModelsResponse>) responseObserver);
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
        case METHODID_CHAT:
          return (io.grpc.stub.StreamObserver<Req>) serviceImpl.chat(
              (io.grpc.stub.StreamObserver<io.millstream.v1.ChatResponse>) responseObserver);
        default:
          throw new AssertionError();
      }
    }
  }

  private static abstract class ProcessorServiceBaseDescriptorSupplier
      implements io.grpc.protobuf.ProtoFileDescriptorSupplier, io.grpc.protobuf.ProtoServiceDescriptorSupplier {
    ProcessorServiceBaseDescriptorSupplier() {}

    @java.lang.Override
    public com.google.protobuf.Descriptors.FileDescriptor getFileDescriptor() {
      return io.millstream.v1.ProcessorProto.getDescriptor();
    }

    @java.lang.Override
    public com.google.protobuf.Descriptors.ServiceDescriptor getServiceDescriptor() {
      return getFileDescriptor().findServiceByName("ProcessorService");
    }
  }

  private static final class ProcessorServiceFileDescriptorSupplier
      extends ProcessorServiceBaseDescriptorSupplier {
    ProcessorServiceFileDescriptorSupplier() {}
  }

  private static final class ProcessorServiceMethodDescriptorSupplier
      extends ProcessorServiceBaseDescriptorSupplier
      implements io.grpc.protobuf.ProtoMethodDescriptorSupplier {
    private final String methodName;

    ProcessorServiceMethodDescriptorSupplier(String methodName) {
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
      synchronized (ProcessorServiceGrpc.class) {
        result = serviceDescriptor;
        if (result == null) {
          serviceDescriptor = result = io.grpc.ServiceDescriptor.newBuilder(SERVICE_NAME)
              .setSchemaDescriptor(new ProcessorServiceFileDescriptorSupplier())
              .addMethod(getChatMethod())
              .addMethod(getCompleteMethod())
              .addMethod(getTokenizeMethod())
              .addMethod(getDetokenizeMethod())
              .addMethod(getListModelsMethod())
              .build();
        }
      }
    }
    return result;
  }
}
