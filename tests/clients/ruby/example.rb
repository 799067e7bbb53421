# frozen_string_literal: true

# A client of Millstream in Ruby; tests/support/clients/client_examples.py says what it does.
require 'google/protobuf/well_known_types' # makes Any#unpack
require 'google/rpc/error_details_pb' # the gem googleapis-common-protos-types
require 'grpc'
require 'grpc/health/v1/health_services_pb' # comes with grpc
require 'json'
require 'millstream/v1/processor_services_pb'
include Millstream::V1

MODEL = ENV.fetch('MILLSTREAM_MODEL')

# The messages of a stream that the program sends one by one; gRPC reads them in a thread of its own.
class Requests
  def initialize
    @queue = Queue.new
  end

  def <<(request)
    @queue << request
    self
  end

  def close
    @queue.close
  end

  def each
    while (request = @queue.pop)
      yield request
    end
  end
end

def print_event(event, fields)
  puts JSON.generate({ event: event, **fields })
  $stdout.flush
end

# `ipv4:` takes a list; a DNS name is `dns:///name:50051`. With TLS: GRPC::Core::ChannelCredentials.new.
def connect
  config = File.read(ENV.fetch('MILLSTREAM_SERVICE_CONFIG'))
  GRPC::ClientStub.setup_channel(nil, "ipv4:#{ENV.fetch('MILLSTREAM_ADDRESSES')}",
                                 :this_channel_is_insecure, 'grpc.service_config' => config)
end

def metadata
  { 'authorization' => "Bearer #{ENV.fetch('MILLSTREAM_API_KEY')}",
    'traceparent' => ENV.fetch('TRACEPARENT') }
end

def options(tokens)
  GenerationOptions.new(sampling: SamplingParams.new(max_new_tokens: tokens, ignore_eos: true))
end

def prompt(model: MODEL, options: options(1))
  CompleteRequest.new(model: model, text: 'Hello', options: options)
end

def ask_for_health(channel)
  health = Grpc::Health::V1::Health::Stub.new('', :this_channel_is_insecure,
                                              channel_override: channel)
  request = Grpc::Health::V1::HealthCheckRequest.new(service: 'millstream.v1.ProcessorService')
  answer = health.check(request, metadata: metadata, deadline: Time.now + 10)
  print_event('health', status: answer.status)
end

# Two turns on one stream; the first is cancelled after its third message.
def chat(processor)
  content = ->(text) { [ContentPart.new(text: text)] }
  hello = ChatMessage.new(role: :CHAT_ROLE_USER, content: content['Hello'])
  start = ChatStart.new(model: MODEL, messages: [hello], options: options(400))
  requests = Requests.new << ChatRequest.new(start: start)
  deltas = 0
  call = processor.chat(requests, metadata: metadata, deadline: Time.now + 30, return_op: true)
  call.execute.each do |response|
    response.choices.each do |choice|
      unless choice.text.empty?
        print_event('delta', turn: response.turn, text: choice.text)
        deltas += 1
        requests << ChatRequest.new(cancel: CancelTurn.new(turn: response.turn)) if deltas == 3
      end
      next if choice.finish_reason == :FINISH_REASON_UNSPECIFIED

      print_event('finished', turn: response.turn, finish_reason: choice.finish_reason,
                              completion_tokens: response.finished.usage.completion_tokens)
    end
    next unless response.finished

    if response.turn == 1
      turn = UserTurn.new(content: content['Go on'], options: options(5))
      requests << ChatRequest.new(user_turn: turn)
    else
      requests.close
    end
  end
  print_event('ended', call: 'chat', code: 'OK')
ensure
  call&.cancel # leaving the loop early doesn't; after the end it has no effect
end

# Runs one completion; returns the error that it ended with.
def complete(processor, request, sent: metadata, seconds: 10)
  processor.complete(request, metadata: sent, deadline: Time.now + seconds).each {}
  nil
rescue GRPC::BadStatus => e
  e
end

CODES = GRPC::Core::StatusCodes.constants.to_h { |name| [GRPC::Core::StatusCodes.const_get(name), name] }

# The details of an error, each by its type's name.
def details_of(error)
  status = error.to_rpc_status
  types = [Google::Rpc::ErrorInfo, Google::Rpc::BadRequest, Google::Rpc::RetryInfo]
  (status ? status.details : []).filter_map do |detail|
    type = types.find { |known| detail.is(known) }
    [type, detail.unpack(type)] if type
  end.to_h
end

def explain(call, error)
  details = details_of(error)
  info = details[Google::Rpc::ErrorInfo]
  violations = details[Google::Rpc::BadRequest]&.field_violations || []
  delay = details[Google::Rpc::RetryInfo]&.retry_delay
  print_event('error', call: call, code: CODES[error.code], message: error.details,
                       reason: info&.reason, domain: info&.domain,
                       retryable: info && info.metadata['retryable'] == 'true',
                       violations: violations.map { |v| { field: v.field, description: v.description } },
                       retry_delay_s: delay && delay.seconds + delay.nanos / 1e9)
end

channel = connect
processor = ProcessorService::Stub.new('', :this_channel_is_insecure, channel_override: channel)
ask_for_health(channel)
chat(processor)
late = complete(processor, prompt(options: options(400)), seconds: 0.5)
print_event('ended', call: 'deadline', code: CODES[late.code])
invalid = GenerationOptions.new(sampling: SamplingParams.new(top_p: 2))
explain('invalid', complete(processor, prompt(options: invalid)))
full = prompt(model: ENV.fetch('MILLSTREAM_FULL_MODEL'))
explain('overloaded', complete(processor, full))
explain('no_key', complete(processor, prompt, sent: {}))
calls = ENV.fetch('MILLSTREAM_CALLS').to_i
calls.times { (error = complete(processor, prompt)) && raise(error) }
print_event('balanced', calls: calls)
