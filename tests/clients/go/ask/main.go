// Asks one question and prints the answer as it comes: go run . 127.0.0.1:50051 MODEL
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"os"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"

	"github.com/millstream/millstream/generated/go/failure"
	millstreamv1 "github.com/millstream/millstream/generated/go/millstream/v1"
)

func main() {
	err := chat(os.Args[1], os.Args[2])
	if f := failure.Of(err); f != nil {
		log.Fatalf("%v: %s; retry after %v; invalid: %v", f.Reason, f.Message, f.RetryDelay, f.Violations)
	}
	if err != nil {
		log.Fatal(err)
	}
}

func chat(address, model string) error {
	connection, err := grpc.NewClient(
		address,
		grpc.WithTransportCredentials(insecure.NewCredentials()), // a server without TLS
		grpc.WithDefaultServiceConfig(millstreamv1.OneServerServiceConfig),
	)
	if err != nil {
		return err
	}
	defer connection.Close()

	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel() // ends the call if this returns early
	if key := os.Getenv("MILLSTREAM_API_KEY"); key != "" {
		ctx = metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+key)
	}
	stream, err := millstreamv1.NewProcessorServiceClient(connection).Chat(ctx)
	if err != nil {
		return err
	}
	if err := stream.Send(question(model, "Hello")); err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	if err := stream.CloseSend(); err != nil { // one question only
		return err
	}
	for {
		response, err := stream.Recv() // says why, if Send has failed
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		for _, choice := range response.GetChoices() {
			fmt.Print(choice.GetText())
		}
		if finished := response.GetFinished(); finished != nil {
			fmt.Printf("\n%d tokens\n", finished.GetUsage().GetCompletionTokens())
		}
	}
}

func question(model, text string) *millstreamv1.ChatRequest {
	tokens := uint32(5)
	return &millstreamv1.ChatRequest{Message: &millstreamv1.ChatRequest_Start{
		Start: &millstreamv1.ChatStart{
			Model: model,
			Messages: []*millstreamv1.ChatMessage{{
				Role:    millstreamv1.ChatRole_CHAT_ROLE_USER,
				Content: []*millstreamv1.ContentPart{{Part: &millstreamv1.ContentPart_Text{Text: text}}},
			}},
			Options: &millstreamv1.GenerationOptions{
				Sampling: &millstreamv1.SamplingParams{MaxNewTokens: &tokens},
			},
		},
	}}
}
