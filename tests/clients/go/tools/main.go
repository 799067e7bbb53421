// Lets the model call a clock and a calculator: go run . 127.0.0.1:50051 "What is 17 times 23?"
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"os"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	millstreamv1 "github.com/millstream/millstream/generated/go/millstream/v1"
)

const mostRounds = 8

var tools = []*millstreamv1.ChatTool{
	{Name: "clock", Description: "Tell the time."},
	{
		Name:        "calculate",
		Description: "Work out an expression, such as 6 * 7.",
		ParametersJsonSchema: `{"type": "object", "properties": {"expression": {"type": "string"}},
			"required": ["expression"]}`,
	},
}

func main() {
	if err := ask(os.Args[1], os.Args[2]); err != nil {
		log.Fatal(err)
	}
}

func ask(address, question string) error {
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
	stream, err := millstreamv1.NewProcessorServiceClient(connection).Chat(ctx)
	if err != nil {
		return err
	}
	next := start(question)
	for round := 0; round <= mostRounds; round++ {
		if err := stream.Send(next); err != nil && !errors.Is(err, io.EOF) {
			return err
		}
		calls, err := read(stream)
		if err != nil || len(calls) == 0 {
			return err
		}
		next = results(calls)
	}
	return fmt.Errorf("the model still calls tools after %d rounds", mostRounds)
}

// read prints an answer while it comes, and returns its calls.
func read(stream millstreamv1.ProcessorService_ChatClient) ([]*millstreamv1.ToolCall, error) {
	var calls []*millstreamv1.ToolCall
	for {
		response, err := stream.Recv() // says why, if Send has failed
		if err != nil {
			return nil, err
		}
		for _, choice := range response.GetChoices() {
			for _, event := range choice.GetEvents() {
				fmt.Print(event.GetText()) // "" for reasoning and calls
			}
			// Whole, in the last delta. With another finish reason there may be some that were cut.
			if choice.GetFinishReason() == millstreamv1.FinishReason_FINISH_REASON_TOOL_CALLS {
				calls = choice.GetToolCalls()
			}
		}
		if response.GetFinished() != nil {
			fmt.Println()
			return calls, nil
		}
	}
}

func start(question string) *millstreamv1.ChatRequest {
	return &millstreamv1.ChatRequest{Message: &millstreamv1.ChatRequest_Start{
		Start: &millstreamv1.ChatStart{
			Messages: []*millstreamv1.ChatMessage{message(millstreamv1.ChatRole_CHAT_ROLE_USER, question)},
			Tools:    tools,
			Output:   millstreamv1.ChatOutput_CHAT_OUTPUT_EVENTS,
		},
	}}
}

func results(calls []*millstreamv1.ToolCall) *millstreamv1.ChatRequest {
	given := &millstreamv1.ToolResults{}
	for _, call := range calls {
		if call.GetIncomplete() {
			continue // it isn't part of the conversation
		}
		result := message(millstreamv1.ChatRole_CHAT_ROLE_TOOL, run(call.GetName(), call.GetArgumentsJson()))
		result.ToolCallId = call.GetId()
		given.Messages = append(given.Messages, result)
	}
	return &millstreamv1.ChatRequest{Message: &millstreamv1.ChatRequest_ToolResults{ToolResults: given}}
}

// run returns what the model gets: a result, or a sentence that says what is wrong.
func run(name, argumentsJSON string) string {
	if name == "clock" {
		return time.Now().Format("15:04")
	}
	if name != "calculate" {
		return "error: there is no tool " + name
	}
	var arguments struct{ Expression string }
	if err := json.Unmarshal([]byte(argumentsJSON), &arguments); err != nil {
		return "error: " + err.Error()
	}
	parts := strings.Fields(arguments.Expression)
	if len(parts) != 3 {
		return "error: write two numbers and a sign between them"
	}
	left, _ := strconv.ParseFloat(parts[0], 64)
	right, _ := strconv.ParseFloat(parts[2], 64)
	values := map[string]float64{"+": left + right, "-": left - right, "*": left * right, "/": left / right}
	value, known := values[parts[1]]
	if !known {
		return "error: there is no sign " + parts[1]
	}
	return strconv.FormatFloat(value, 'f', -1, 64)
}

func message(role millstreamv1.ChatRole, text string) *millstreamv1.ChatMessage {
	return &millstreamv1.ChatMessage{
		Role:    role,
		Content: []*millstreamv1.ContentPart{{Part: &millstreamv1.ContentPart_Text{Text: text}}},
	}
}
