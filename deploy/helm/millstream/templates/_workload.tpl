{{/* The workload of one pool of any role. Takes (dict "root" $ "pool" $pool). */}}
{{- define "millstream.workload" -}}
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ .pool.fullname }}
  namespace: {{ .root.Release.Namespace }}
  labels:
    {{- include "millstream.poolLabels" . | nindent 4 }}
spec:
  {{- if eq .pool.autoscaling.kind "none" }}
  replicas: {{ .pool.replicas }}
  {{- end }}
  selector:
    matchLabels:
      {{- include "millstream.selector" . | nindent 6 }}
  template:
    {{- include "millstream.podTemplate" . | nindent 4 }}
{{- end -}}

{{- define "millstream.podTemplate" -}}
metadata:
  labels:
    {{- include "millstream.poolLabels" . | nindent 4 }}
    {{- if .pool.worker }}
    millstream.io/worker: "true"
    {{- end }}
spec:
  containers:
    - name: {{ .pool.role }}
      image: {{ include "millstream.image" (dict "root" .root "image" (ternary "worker" "processor" .pool.worker)) }}
      args: ["-m", "millstream_server.{{ .pool.role }}", "--config", "/etc/millstream/config.yaml"]
      ports:
        - {name: grpc, containerPort: 50051}
        - {name: metrics, containerPort: 9464}
{{- end -}}
