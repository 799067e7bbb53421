{{/*
GPUs of one engine. SGLang for text and vectors: tensor x pipeline x data; data-parallel attention shares
the GPUs of tensor parallelism. Images and videos: `tensor` GPUs. The vision tower of an encode worker: 1.
Without a GPU resource: 0. Takes (dict "root" $ "pool" $pool).
*/}}
{{- define "millstream.gpus" -}}
{{- $sizes := .pool.parallelism -}}
{{- if not .pool.gpu.resource -}}0
{{- else -}}
{{- mul (int $sizes.tensor) (int $sizes.pipeline) (int $sizes.data) -}}
{{- end -}}
{{- end -}}

{{/* GPUs of one pod. That they divide evenly is checked in _checks.tpl. */}}
{{- define "millstream.gpusPerNode" -}}
{{- div (include "millstream.gpus" . | int) (int .pool.parallelism.nodes) -}}
{{- end -}}

{{/* A pool's resources, with its GPUs and RDMA devices, and the disk for a model that the pod itself fetches: the scheduler would
not see it otherwise. */}}
{{- define "millstream.resources" -}}
{{- $devices := dict -}}
{{- if .pool.gpu.resource -}}
{{- $_ := set $devices .pool.gpu.resource (include "millstream.gpusPerNode" . | int) -}}
{{- end -}}
{{- if .pool.rdma.enabled -}}
{{- $_ := set $devices .pool.rdma.resource (int .pool.rdma.count) -}}
{{- end -}}
{{- $resources := deepCopy .pool.resources -}}
{{- $model := index .root.Values.models .pool.model | default dict -}}
{{- $fetched := has (include "millstream.scheme" ($model.uri | default "")) (list "hf" "s3") -}}
{{- if and $fetched $model.size (not $model.storageClass) (not (include "millstream.byJob" $model)) -}}
{{- $_ := set $resources "requests" (merge (default dict $resources.requests) (dict "ephemeral-storage" (toString $model.size))) -}}
{{- end -}}
{{- if $devices -}}
{{- $_ := set $resources "requests" (merge (deepCopy $devices) ($resources.requests | default dict)) -}}
{{- $_ := set $resources "limits" (merge (deepCopy $devices) ($resources.limits | default dict)) -}}
{{- end -}}
{{- $resources | toYaml -}}
{{- end -}}
