{{- define "millstream.checkGateway" -}}
{{- $route := .Values.gateway.route -}}
{{- $pool := .Values.gateway.inferencePool -}}
{{- $apis := .Capabilities.APIVersions -}}
{{- if $route.enabled -}}
{{- if not ($apis.Has "gateway.networking.k8s.io/v1/GRPCRoute") }}
gateway.route.enabled is true, and the cluster has no GRPCRoute; install the Gateway API 1.1 or later, or set it to false. To render without a cluster add --api-versions gateway.networking.k8s.io/v1/GRPCRoute
{{- end -}}
{{- if not $route.parentRefs }}
gateway.route.enabled is true, and gateway.route.parentRefs is empty; name the gateway, such as [{name: public, namespace: gateways}]
{{- end -}}
{{- if and .Values.security.tls.enabled (not $route.backendTls) }}
gateway.route.enabled is true, and the Processor serves with TLS; make a BackendTLSPolicy for its service, so that the gateway connects with TLS, and then set gateway.route.backendTls=true
{{- end -}}
{{- end -}}
{{- if and $route.http.enabled (not $route.enabled) }}
gateway.route.http.enabled is true, and gateway.route.enabled isn't; set it to true
{{- end -}}
{{- if and $route.http.enabled (eq (dig "settings" "http" true .Values.processor | toString) "false") }}
gateway.route.http.enabled is true, and processor.settings.http is false; set one of them the other way
{{- end -}}
{{- if $pool.enabled -}}
{{- if not ($apis.Has "inference.networking.k8s.io/v1/InferencePool") }}
gateway.inferencePool.enabled is true, and the cluster has no InferencePool; install the Gateway API Inference Extension 1.0 or later, or set it to false. To render without a cluster add --api-versions inference.networking.k8s.io/v1/InferencePool
{{- end -}}
{{- if not $pool.endpointPicker.name }}
gateway.inferencePool.enabled is true, and gateway.inferencePool.endpointPicker.name is empty; name the service of the endpoint picker, which this chart doesn't install
{{- end -}}
{{- end -}}
{{- $ingress := .Values.gateway.ingress -}}
{{- if and $ingress.enabled (not $ingress.host) }}
gateway.ingress.enabled is true, and gateway.ingress.host is empty; name the host that clients use
{{- end -}}
{{- if and (or $route.enabled $pool.enabled $ingress.enabled) (not .Values.processor.enabled) }}
gateway.route, gateway.ingress or gateway.inferencePool is enabled, and the Processor isn't; set processor.enabled=true, or all of them to false
{{- end -}}
{{- end -}}
