// An example client: health, a chat with a cancel and a second turn, a deadline, errors with their
// details. It reads its settings from the environment and prints a JSON object per line; the tests
// run it. docs/clients/go.md explains it.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"log"
	"os"
	"strconv"
	"time"

	"google.golang.org/grpc"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"

	millstreamv1 "github.com/millstream/millstream/generated/go/millstream/v1"
)

const (
	longAnswer   = 400
	shortAnswer  = 5
	cancelAfter  = 3
	callDeadline = 10 * time.Second
)

var out = json.NewEncoder(os.Stdout) // writes each line at once

type event map[string]any

func print(e event) {
	if err := out.Encode(e); err != nil {
		log.Fatal(err)
	}
}

// client is one connection to the suite, and the headers that every call has.
type client struct {
	stub    millstreamv1.ProcessorServiceClient
	health  healthpb.HealthClient
	model   string
	headers metadata.MD
}

func main() {
	connection, err := connect(os.Getenv("MILLSTREAM_ADDRESSES"), os.Getenv("MILLSTREAM_SERVICE_CONFIG"))
	if err != nil {
		log.Fatal(err)
	}
	defer connection.Close()
	c := &client{
		stub:   millstreamv1.NewProcessorServiceClient(connection),
		health: healthpb.NewHealthClient(connection),
		model:  os.Getenv("MILLSTREAM_MODEL"),
		headers: metadata.Pairs(
			"authorization", "Bearer "+os.Getenv("MILLSTREAM_API_KEY"),
			"traceparent", os.Getenv("TRACEPARENT"),
		),
	}
	for _, step := range []func() error{c.checkHealth, c.chat, c.missDeadline, c.fail, c.balance} {
		if err := step(); err != nil {
			log.Fatal(err)
		}
	}
}

// within returns a context for one call. A call without a deadline may wait for ever.
func (c *client) within(limit time.Duration) (context.Context, context.CancelFunc) {
	return context.WithTimeout(metadata.NewOutgoingContext(context.Background(), c.headers), limit)
}

func (c *client) checkHealth() error {
	ctx, cancel := c.within(callDeadline)
	defer cancel()
	request := &healthpb.HealthCheckRequest{Service: "millstream.v1.ProcessorService"}
	response, err := c.health.Check(ctx, request, grpc.WaitForReady(true))
	if err != nil {
		return err
	}
	print(event{"event": "health", "status": response.GetStatus().String()})
	return nil
}

// chat has two turns on one stream. The first is cancelled by a message, which ends the turn and keeps
// the conversation; cancelling the context would end the stream.
func (c *client) chat() error {
	ctx, cancel := c.within(callDeadline)
	defer cancel() // frees the stream if this returns early
	stream, err := c.stub.Chat(ctx)
	if err != nil {
		return err
	}
	if err := stream.Send(start(c.model, "Say the alphabet.", options(longAnswer))); err != nil {
		return streamError(stream, err)
	}
	deltas := 0
	for {
		response, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			print(event{"event": "ended", "call": "chat", "code": "OK"})
			return nil
		}
		if err != nil {
			return err
		}
		if printDelta(response) {
			deltas++
			if deltas == cancelAfter {
				err = stream.Send(cancelTurn(response.GetTurn()))
			}
		}
		if response.GetFinished() != nil {
			printFinished(response)
			if response.GetTurn() == 1 {
				err = stream.Send(nextTurn("Again, the beginning only.", options(shortAnswer)))
			} else {
				err = stream.CloseSend() // the server ends the stream
			}
		}
		if err != nil {
			return streamError(stream, err)
		}
	}
}

// streamError returns the stream's status: Send itself only says io.EOF when the server has ended it.
func streamError(stream millstreamv1.ProcessorService_ChatClient, err error) error {
	if errors.Is(err, io.EOF) {
		_, err = stream.Recv()
	}
	return err
}

func printDelta(response *millstreamv1.ChatResponse) bool {
	text := ""
	for _, choice := range response.GetChoices() {
		text += choice.GetText()
	}
	if text != "" {
		print(event{"event": "delta", "turn": response.GetTurn(), "text": text})
	}
	return text != ""
}

func printFinished(response *millstreamv1.ChatResponse) {
	print(event{
		"event":             "finished",
		"turn":              response.GetTurn(),
		"finish_reason":     finishReason(response),
		"completion_tokens": response.GetFinished().GetUsage().GetCompletionTokens(),
	})
}

// finishReason is that of the only choice; it stands in the choice's last delta.
func finishReason(response *millstreamv1.ChatResponse) string {
	for _, choice := range response.GetChoices() {
		if reason := choice.GetFinishReason(); reason != millstreamv1.FinishReason_FINISH_REASON_UNSPECIFIED {
			return reason.String()
		}
	}
	return ""
}

func (c *client) missDeadline() error {
	ctx, cancel := c.within(500 * time.Millisecond)
	defer cancel()
	err := c.complete(ctx, c.model, options(longAnswer))
	print(event{"event": "ended", "call": "deadline", "code": codeName(err)})
	return nil
}

// complete reads a whole answer. The stream must be read until its error, io.EOF included: only then
// the call is over.
func (c *client) complete(ctx context.Context, model string, options *millstreamv1.GenerationOptions) error {
	request := &millstreamv1.CompleteRequest{
		Model:   model,
		Prompt:  &millstreamv1.CompleteRequest_Text{Text: "Hello"},
		Options: options,
	}
	stream, err := c.stub.Complete(ctx, request)
	for err == nil {
		_, err = stream.Recv()
	}
	if errors.Is(err, io.EOF) {
		return nil
	}
	return err
}

func (c *client) fail() error {
	ctx, cancel := c.within(callDeadline)
	defer cancel()
	topP := float32(2)
	invalid := options(shortAnswer)
	invalid.Sampling.TopP = &topP
	printError("invalid", c.complete(ctx, c.model, invalid))
	full := os.Getenv("MILLSTREAM_FULL_MODEL")
	printError("overloaded", c.complete(ctx, full, options(shortAnswer)))
	withoutKey := metadata.Pairs("traceparent", os.Getenv("TRACEPARENT"))
	printError("no_key", c.complete(metadata.NewOutgoingContext(ctx, withoutKey), c.model, options(1)))
	return nil
}

func (c *client) balance() error {
	calls, err := strconv.Atoi(os.Getenv("MILLSTREAM_CALLS"))
	if err != nil {
		return err
	}
	for i := 0; i < calls; i++ {
		ctx, cancel := c.within(callDeadline)
		err := c.complete(ctx, c.model, options(1))
		cancel()
		if err != nil {
			return err
		}
	}
	print(event{"event": "balanced", "calls": calls})
	return nil
}
