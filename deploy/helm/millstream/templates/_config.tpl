{{/*
The settings of a pool's processes, as they stand in its config.yaml. Later ones win: what the chart
works out, then the pool's `settings`. Nested sections of `settings` become flat names, so that a name
is there once. Takes (dict "root" $ "pool" $pool).
*/}}
{{- define "millstream.settings" -}}
{{- $pool := .pool -}}
{{- $settings := dict
  "listen" "0.0.0.0:50051"
  "metrics_listen" "0.0.0.0:9464"
  "propagation_s" $pool.drain.propagationSeconds
  "drain_s" $pool.drain.limitSeconds -}}
{{- if include "millstream.adminPort" .root -}}
{{- $_ := set $settings "admin_listen" "127.0.0.1:9564" -}}
{{- end -}}
{{- $settings = merge $settings (include "millstream.tlsSettings" . | fromYaml) -}}
{{- if $pool.worker -}}
{{- $settings = merge $settings (include "millstream.workerSettings" . | fromYaml) -}}
{{- else -}}
{{- $settings = merge $settings (include "millstream.processorSettings" . | fromYaml) -}}
{{- end -}}
{{- include "millstream.flatten" $pool.settings | fromYaml | mergeOverwrite $settings | toYaml -}}
{{- end -}}

{{/* A nested section's keys get its name in front: {tls: {cert_file: x}} is {tls_cert_file: x}. */}}
{{- define "millstream.flatten" -}}
{{- $flat := dict -}}
{{- range $key, $value := . -}}
{{- if kindIs "map" $value -}}
{{- range $rest, $part := include "millstream.flatten" $value | fromYaml -}}
{{- $_ := set $flat (printf "%s_%s" $key $rest) $part -}}
{{- end -}}
{{- else if not (kindIs "invalid" $value) -}}
{{- $_ := set $flat $key $value -}}
{{- end -}}
{{- end -}}
{{- $flat | toYaml -}}
{{- end -}}

{{- define "millstream.workerSettings" -}}
{{- $pool := .pool -}}
{{- $model := index .root.Values.models $pool.model -}}
model_name: {{ $model.servedName | default $pool.model | quote }}
{{- with include "millstream.modelDirectory" (dict "model" $model "name" $pool.model) }}
model_path: {{ . | quote }}
{{- end }}
{{- if eq $pool.role "prefill" }}
bootstrap_port: 8998
{{- end }}
{{- if and $pool.gpu.resource (ne (include "millstream.engine" .) "simulated") }}
device: cuda
{{- end }}
{{- if eq $pool.role "decode" }}
mode: {{ include "millstream.mode" . }}
{{- end }}
{{- if gt (int $pool.parallelism.nodes) 1 }}
nodes: {{ int $pool.parallelism.nodes }}
{{- if and (gt (int $pool.parallelism.attentionData) 1) (has $pool.role (list "prefill" "decode" "diffusion")) }}
{{- /* One port per rank, from here on, of the leader's pod: only pods of its group reach it. */}}
kv_events_port: 21000
{{- end }}
{{- end }}
{{- if and (eq $pool.role "diffusion") (eq (include "millstream.engine" .) "sglang") (gt (int $pool.parallelism.tensor) 1) }}
num_gpus: {{ int $pool.parallelism.tensor }}
{{- end }}
{{- with include "millstream.engineArgs" . | fromYaml }}
engine_args:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* The engine's arguments: the pool's own, and those that `parallelism` stands for. */}}
{{- define "millstream.engineArgs" -}}
{{- $arguments := deepCopy .pool.engineArgs -}}
{{- $sizes := dict "tensor" "tp_size" "pipeline" "pp_size" "data" "dp_size" "attentionData" "attn_dp_size" -}}
{{- if eq (include "millstream.engine" .) "vllm" -}}
{{- $sizes = dict "tensor" "tensor_parallel_size" "pipeline" "pipeline_parallel_size" "data" "data_parallel_size" -}}
{{- else if eq (include "millstream.engine" .) "simulated" -}}
{{- $sizes = dict "data" "dp_size" -}}
{{- end -}}
{{- if ne (include "millstream.makesMedia" .) "true" -}}
{{- range $part, $argument := $sizes -}}
{{- $size := index $.pool.parallelism $part | int -}}
{{- if gt $size 1 -}}
{{- $_ := set $arguments $argument $size -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $arguments | toYaml -}}
{{- end -}}

{{- define "millstream.processorSettings" -}}
{{- $models := list -}}
{{- range $name, $model := include "millstream.servedModels" .root | fromYaml -}}
{{- $served := $model.servedName | default $name -}}
{{- $directory := include "millstream.tokenizerDirectory" (dict "model" $model "name" $name) -}}
{{- $models = append $models (and $model.tokenizer (ne $directory "") | ternary (printf "%s=%s" $served $directory) $served) -}}
{{- end -}}
models: {{ $models | toJson }}
workers: {{ include "millstream.workerAddresses" .root }}
{{- if .root.Values.security.apiKeys.enabled }}
api_keys_file: /etc/millstream/api-keys/api-keys
{{- end }}
{{- end -}}

{{/* The Processor's `workers`, as a JSON list. Takes the root context. */}}
{{- define "millstream.workerAddresses" -}}
{{- prepend .Values.discovery.extraWorkers (include "millstream.discovered" (list . "workers")) | toJson -}}
{{- end -}}

{{/* How the pods of a headless service are found. Takes (list $root "workers"). */}}
{{- define "millstream.discovered" -}}
{{- $root := index . 0 -}}
{{- if eq $root.Values.discovery.kind "endpointslices" -}}
k8s:{{ $root.Release.Namespace }}/{{ include "millstream.fit" . }}
{{- else -}}
dns:{{ include "millstream.fit" . }}.{{ $root.Release.Namespace }}.svc.{{ $root.Values.clusterDomain }}:50051
{{- end -}}
{{- end -}}

{{/* A decode pool's mode: disaggregated where the model has prefill workers of its engine, unless it says otherwise. */}}
{{- define "millstream.mode" -}}
{{- $partner := include "millstream.hasPool" (dict "root" .root "role" "prefill" "model" .pool.model "engine" (include "millstream.engine" .)) -}}
{{- .pool.settings.mode | default (empty $partner | ternary "aggregated" "disaggregated") -}}
{{- end -}}

{{/* Not empty if the model has a pool of the role; with "engine", one that runs it; with "connector", one that hands off so. Takes (dict "root" $ "role" "prefill" "model" "llama"). */}}
{{- define "millstream.hasPool" -}}
{{- $wanted := . -}}
{{- $_ := include "millstream.pools" .root -}}
{{- range .root.Values.poolList -}}
{{- if and (eq .role $wanted.role) (eq .model $wanted.model) (or (not $wanted.engine) (eq (include "millstream.engine" (dict "pool" .)) $wanted.engine))
  (or (not $wanted.connector) (eq (include "millstream.connector" (dict "pool" .)) $wanted.connector)) -}}true{{- end -}}
{{- end -}}
{{- end -}}

{{/* The engine of a pool, as its settings name it. */}}
{{- define "millstream.engine" -}}
{{- $default := and (eq .pool.role "diffusion") (ne (.pool.settings.kind | default "image") "text") | ternary "diffusers" "sglang" -}}
{{- .pool.settings.engine | default $default -}}
{{- end -}}

{{/* How a vLLM pool hands its KV cache off, as its setting says; empty for other engines. Takes (dict "pool" $pool). */}}
{{- define "millstream.connector" -}}
{{- if eq (include "millstream.engine" .) "vllm" -}}{{- .pool.settings.kv_connector | default "push" -}}{{- end -}}
{{- end -}}

{{/* On how many ports, from 8998 on, a prefill pod waits for decode pods: SGLang's bootstrap server on one, the side channels of vLLM's
NIXL on one per copy of the model. Takes (dict "root" $ "pool" $pool). */}}
{{- define "millstream.bootstrapPorts" -}}
{{- eq (include "millstream.engine" .) "vllm" | ternary (int .pool.parallelism.data) 1 -}}
{{- end -}}

{{/* "true" for a pool that makes images or videos: its engine isn't SGLang's for text. */}}
{{- define "millstream.makesMedia" -}}
{{- if and (eq .pool.role "diffusion") (ne (.pool.settings.kind | default "image") "text") -}}true{{- end -}}
{{- end -}}

{{/* Seconds until a pod is killed: preStop, propagation and drain, and 10 for the rest of the shutdown. */}}
{{- define "millstream.grace" -}}
{{- $settings := include "millstream.settings" . | fromYaml -}}
{{- add (int .pool.drain.preStopSeconds) (ceil (addf $settings.propagation_s $settings.drain_s)) 10 -}}
{{- end -}}
