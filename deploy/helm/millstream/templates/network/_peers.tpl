{{/* Pods of this release. Takes (dict "root" $ "components" list "labels" dict); both may be missing. */}}
{{- define "millstream.pods" -}}
podSelector:
  matchLabels:
    app.kubernetes.io/name: {{ include "millstream.name" .root | quote }}
    app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
    {{- with .labels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with .components }}
  matchExpressions:
    - {key: app.kubernetes.io/component, operator: In, values: [{{ join ", " . }}]}
  {{- end }}
{{- end -}}

{{/* The beginning of a policy. Its name may be long: no pod has it. Takes the same, and "name". */}}
{{- define "millstream.policy" -}}
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  {{- include "millstream.metadata" (dict "root" .root "name" (printf "%s-net-%s" (include "millstream.fullname" .root) .name)) | nindent 2 }}
spec:
  {{- include "millstream.pods" . | nindent 2 }}
{{- end -}}

{{/*
Ports by the name of what listens there. `bootstrap`: where prefill workers wait for decode workers. `engine`: where
engines listen for each other. SGLang's ZMQ sockets take random ports from 49152 on; NIXL (UCX) and Mooncake take what
the kernel gives, from 32768 on; so it is all of these but the gRPC port, which is always taken.
RDMA itself passes no NetworkPolicy; the TCP connections that set it up do. `all`: the processes of one
engine on several nodes, whose torch.distributed, NCCL and Gloo take any. Takes an edge.
*/}}
{{- define "millstream.ports" -}}
{{- if has "grpc" .ports }}
- {protocol: TCP, port: 50051}
{{- end }}
{{- if has "bootstrap" .ports }}
- {protocol: TCP, port: 8998{{ if gt (int .bootstrapPorts) 1 }}, endPort: {{ add 8997 .bootstrapPorts }}{{ end }}}
{{- end }}
{{- if has "engine" .ports }}
- {protocol: TCP, port: 32768, endPort: 50050}
- {protocol: TCP, port: 50052, endPort: 65535}
{{- end }}
{{- if has "all" .ports }}
- {protocol: TCP, port: 1, endPort: 65535}
{{- end }}
{{- end -}}

{{/* The addresses outside of the cluster that may call the Processor, as peers of a policy: those of networkPolicy.clients, and, where
they are seen as they are, those that the load balancer lets in. Takes the root context. */}}
{{- define "millstream.clientBlocks" -}}
{{- $service := .Values.processor.service -}}
{{- $blocks := list -}}
{{- range .Values.networkPolicy.clients -}}
{{- if .ipBlock -}}{{- $blocks = append $blocks . -}}{{- end -}}
{{- end -}}
{{- if eq $service.externalTrafficPolicy "Local" -}}
{{- range $service.loadBalancerSourceRanges -}}
{{- $blocks = append $blocks (dict "ipBlock" (dict "cidr" .)) -}}
{{- end -}}
{{- end -}}
{{- with $blocks | uniq -}}{{- toYaml . -}}{{- end -}}
{{- end -}}
