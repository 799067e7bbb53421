package main

import (
	millstreamv1 "github.com/millstream/millstream/generated/go/millstream/v1"
)

// options asks for at most so many tokens. `optional` fields are pointers.
func options(tokens uint32) *millstreamv1.GenerationOptions {
	return &millstreamv1.GenerationOptions{
		Sampling: &millstreamv1.SamplingParams{MaxNewTokens: &tokens},
	}
}

func text(text string) []*millstreamv1.ContentPart {
	return []*millstreamv1.ContentPart{{Part: &millstreamv1.ContentPart_Text{Text: text}}}
}

func start(model, question string, options *millstreamv1.GenerationOptions) *millstreamv1.ChatRequest {
	return &millstreamv1.ChatRequest{Message: &millstreamv1.ChatRequest_Start{
		Start: &millstreamv1.ChatStart{
			Model: model,
			Messages: []*millstreamv1.ChatMessage{
				{Role: millstreamv1.ChatRole_CHAT_ROLE_USER, Content: text(question)},
			},
			Options: options,
		},
	}}
}

func nextTurn(question string, options *millstreamv1.GenerationOptions) *millstreamv1.ChatRequest {
	return &millstreamv1.ChatRequest{Message: &millstreamv1.ChatRequest_UserTurn{
		UserTurn: &millstreamv1.UserTurn{Content: text(question), Options: options},
	}}
}

// cancelTurn names the turn, so that a cancel that comes too late doesn't stop the next one.
func cancelTurn(turn uint32) *millstreamv1.ChatRequest {
	return &millstreamv1.ChatRequest{Message: &millstreamv1.ChatRequest_Cancel{
		Cancel: &millstreamv1.CancelTurn{Turn: &turn},
	}}
}
