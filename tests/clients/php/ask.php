<?php
// Asks one question and prints the answer as it comes: php ask.php 127.0.0.1:50051 MODEL
declare(strict_types=1);

use Google\Rpc\BadRequest;
use Google\Rpc\ErrorInfo;
use Google\Rpc\RetryInfo;
use Google\Rpc\Status;
use Grpc\ChannelCredentials;
use Millstream\V1\ChatMessage;
use Millstream\V1\ChatRequest;
use Millstream\V1\ChatRole;
use Millstream\V1\ChatStart;
use Millstream\V1\ContentPart;
use Millstream\V1\GenerationOptions;
use Millstream\V1\ProcessorServiceClient;
use Millstream\V1\SamplingParams;

require __DIR__ . '/vendor/autoload.php';

// An Any is unpacked by the descriptors that were loaded before.
foreach ([BadRequest::class, ErrorInfo::class, RetryInfo::class] as $known) {
    new $known();
}

exit(ask($argv[1], $argv[2]));

function ask(string $address, string $model): int
{
    $processor = new ProcessorServiceClient($address, [
        'credentials' => ChannelCredentials::createInsecure(), // a server without TLS
    ]);
    $key = getenv('MILLSTREAM_API_KEY');
    $metadata = $key === false ? [] : ['authorization' => ["Bearer $key"]];
    $call = $processor->Chat($metadata, ['timeout' => 60_000_000]); // microseconds
    $call->write(question($model, 'Hello'));
    $call->writesDone(); // one question only
    while (($response = $call->read()) !== null) {
        foreach ($response->getChoices() as $choice) {
            echo $choice->getText();
        }
        if ($response->hasFinished()) {
            echo "\n", $response->getFinished()->getUsage()->getCompletionTokens(), " tokens\n";
        }
    }
    $status = $call->getStatus();
    if ($status->code === Grpc\STATUS_OK) {
        return 0;
    }
    fwrite(STDERR, failure($status) . "\n");
    return 1;
}

function question(string $model, string $text): ChatRequest
{
    return new ChatRequest([
        'start' => new ChatStart([
            'model' => $model,
            'messages' => [
                new ChatMessage([
                    'role' => ChatRole::CHAT_ROLE_USER,
                    'content' => [new ContentPart(['text' => $text])],
                ]),
            ],
            'options' => new GenerationOptions([
                'sampling' => new SamplingParams(['max_new_tokens' => 5]),
            ]),
        ]),
    ]);
}

/** Says why a call failed: its reason, its sentence, what is invalid, when to send it again. */
function failure(object $status): string
{
    $said = $status->details;
    $decoded = new Status();
    $decoded->mergeFromString($status->metadata['grpc-status-details-bin'][0] ?? '');
    foreach ($decoded->getDetails() as $any) {
        $detail = $any->unpack();
        if ($detail instanceof ErrorInfo) {
            $said = $detail->getReason() . ": $said";
        } elseif ($detail instanceof BadRequest) {
            foreach ($detail->getFieldViolations() as $violation) {
                $said .= '; ' . $violation->getField() . ' ' . $violation->getDescription();
            }
        } elseif ($detail instanceof RetryInfo) {
            $delay = $detail->getRetryDelay();
            $said .= '; retry after ' . ($delay->getSeconds() + $delay->getNanos() / 1e9) . ' s';
        }
    }
    return $said;
}
