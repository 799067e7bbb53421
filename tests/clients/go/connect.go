package main

import (
	"os"
	"strings"

	"google.golang.org/grpc"
	_ "google.golang.org/grpc/balancer/weightedroundrobin" // lets the service config name it
	_ "google.golang.org/grpc/health"                      // lets the service config check health
	"google.golang.org/grpc/resolver"
	"google.golang.org/grpc/resolver/manual"
)

// connect opens one channel over several servers. With a headless service the target is
// "dns:///NAME:50051", and nothing of `manual` is needed. grpc.Dial and grpc.WithInsecure are here for
// old versions of grpc-go: from 1.63 on write grpc.NewClient and insecure.NewCredentials().
func connect(addresses, serviceConfigPath string) (*grpc.ClientConn, error) {
	serviceConfig, err := os.ReadFile(serviceConfigPath)
	if err != nil {
		return nil, err
	}
	var servers []resolver.Address
	for _, address := range strings.Split(addresses, ",") {
		servers = append(servers, resolver.Address{Addr: address})
	}
	list := manual.NewBuilderWithScheme("list")
	list.InitialState(resolver.State{Addresses: servers})
	return grpc.Dial(
		"list:///processors",
		grpc.WithResolvers(list),
		grpc.WithInsecure(),
		grpc.WithDefaultServiceConfig(string(serviceConfig)),
	)
}
