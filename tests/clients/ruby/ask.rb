# frozen_string_literal: true

# Asks one question and prints the answer as it comes; Ctrl-C ends it: ruby -I lib ask.rb 127.0.0.1:50051 MODEL [TOKENS]
require 'google/protobuf/well_known_types' # makes Any#unpack
require 'google/rpc/error_details_pb' # the gem googleapis-common-protos-types
require 'grpc'
require 'millstream/v1/processor_services_pb'
include Millstream::V1

address, model, tokens = ARGV
# A server with TLS: GRPC::Core::ChannelCredentials.new.
processor = ProcessorService::Stub.new(address, :this_channel_is_insecure)
key = ENV['MILLSTREAM_API_KEY']
metadata = key ? { 'authorization' => "Bearer #{key}" } : {}

hello = ChatMessage.new(role: :CHAT_ROLE_USER, content: [ContentPart.new(text: 'Hello')])
options = GenerationOptions.new(sampling: SamplingParams.new(max_new_tokens: (tokens || 5).to_i))
requests = Queue.new # gRPC reads it in a thread of its own
requests << ChatRequest.new(start: ChatStart.new(model: model, messages: [hello], options: options))
# A message ends the turn and keeps the conversation; call.cancel ends the whole call.
trap('INT') { requests << ChatRequest.new(cancel: CancelTurn.new(turn: 1)) }

begin
  stream = Enumerator.new { |sent| while (request = requests.pop) do sent << request end }
  call = processor.chat(stream, metadata: metadata, deadline: Time.now + 60, return_op: true)
  call.execute.each do |response|
    response.choices.each { |choice| print choice.text }
    $stdout.flush
    next unless response.finished

    puts "\n#{response.finished.usage.completion_tokens} tokens"
    requests.close # or ask again, with `user_turn`
  end
rescue GRPC::BadStatus => e
  # nil for what the library says itself: a deadline, a lost connection.
  details = e.to_rpc_status&.details || []
  info = details.find { |detail| detail.is(Google::Rpc::ErrorInfo) }&.unpack(Google::Rpc::ErrorInfo)
  warn "#{info ? info.reason : 'no reason'}: #{e.details}"
  exit 1
ensure
  call&.cancel # leaving the loop early doesn't; after the end it has no effect
end
