{{/*
Who of the release connects to whom, as a YAML list of {name, from, to, ports}; `from` and `to` are
{components, labels}, and `from` opens the connection. Takes the root context.

  - the Processor to workers; the pod of `helm test`, and `millstream top` in a Processor's pod, to Processors;
  - prefill and decode workers of a model, both ways: the decode worker asks the prefill worker's
    bootstrap server (vLLM: the side channel of NIXL), each tells the other's ZMQ socket how far it
    is, NIXL connects from the side that writes;
  - workers that run prompts to encode workers, for tickets and embeddings; NIXL may answer with a
    connection of its own;
  - the pods of an engine that spans nodes.
*/}}
{{- define "millstream.edges" -}}
{{- $root := . -}}
{{- if .Values.processor.enabled -}}
- name: to-workers
  from: {components: [processor]}
  to: {components: [encode, prefill, decode, diffusion, embedding]}
  ports: [grpc]
- name: to-processor
  from: {components: [test, processor]}
  to: {components: [processor]}
  ports: [grpc]
{{- end -}}
{{- $models := dict -}}
{{- range $pool := include "millstream.pools" . | fromYamlArray -}}
{{- if $pool.worker -}}
{{- $mode := "" -}}
{{- if eq $pool.role "decode" -}}
{{- $mode = include "millstream.mode" (dict "root" $root "pool" $pool) -}}
{{- end -}}
{{- $roles := index $models $pool.model | default dict -}}
{{- $part := eq $mode "aggregated" | ternary "aggregated" $pool.role -}}
{{- if eq $pool.role "prefill" -}}
{{- $_ := set $roles "bootstrapPorts" (max (default 1 $roles.bootstrapPorts) (include "millstream.bootstrapPorts" (dict "root" $root "pool" $pool) | int)) -}}
{{- end -}}
{{- $_ := set $models $pool.model (set $roles $part true) -}}
{{- if gt (int $pool.parallelism.nodes) 1 }}
{{- $group := dict "components" (list $pool.role) "labels" (dict "millstream.io/pool" $pool.name) }}
- {{ dict "name" (printf "group-%s-%s" $pool.role $pool.name) "from" $group "to" $group "ports" (list "all") | toJson }}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $model, $roles := $models -}}
{{- $of := dict "millstream.io/model" $model -}}
{{- $name := include "millstream.dashed" $model -}}
{{- $prefill := dict "components" (list "prefill") "labels" $of -}}
{{- $decode := dict "components" (list "decode") "labels" $of -}}
{{- $encode := dict "components" (list "encode") "labels" $of -}}
{{- if and $roles.prefill $roles.decode }}
- {{ dict "name" (printf "kv-%s" $name) "from" $decode "to" $prefill "ports" (list "bootstrap" "engine") "bootstrapPorts" $roles.bootstrapPorts | toJson }}
- {{ dict "name" (printf "back-kv-%s" $name) "from" $prefill "to" $decode "ports" (list "engine") | toJson }}
{{- end -}}
{{- range $part, $from := dict "prefill" $prefill "aggregated" $decode -}}
{{- if and $roles.encode (index $roles $part) }}
- {{ dict "name" (printf "embeddings-%s-%s" $part $name) "from" $from "to" $encode "ports" (list "grpc" "engine") | toJson }}
- {{ dict "name" (printf "back-embeddings-%s-%s" $part $name) "from" $encode "to" $from "ports" (list "engine") | toJson }}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/*
Rules for what a pool's pods call outside of the release, as a YAML list. Takes (dict "root" $ "pool" $pool).
*/}}
{{- define "millstream.outside" -}}
{{- $net := .root.Values.networkPolicy -}}
{{- $settings := include "millstream.settings" . | fromYaml -}}
{{- $rules := index $net.extraEgress .pool.role | default list -}}
{{- $initial := (include "millstream.modelParts" . | fromYaml).init -}}
{{- range $initial -}}
{{- if has "fetch" .args -}}
{{- $rules = concat $rules (include "millstream.publicRules" (list $ $net.modelHub 443) | fromYamlArray) -}}
{{- end -}}
{{- end -}}
{{- if $settings.storage_url -}}
{{- $rules = concat $rules (include "millstream.publicRules" (list $ $net.storage 443) | fromYamlArray) -}}
{{- end -}}
{{- if $settings.fetch_urls -}}
{{- $rules = concat $rules (include "millstream.publicRules" (list $ $net.clientUrls 80 443) | fromYamlArray) -}}
{{- end -}}
{{- if $settings.otlp_endpoint -}}
{{- $rules = concat $rules $net.tracing -}}
{{- end -}}
{{- if and (not .pool.worker) (eq .root.Values.discovery.kind "endpointslices") -}}
{{- $rules = concat $rules $net.kubernetesApi -}}
{{- end -}}
{{- $rules | uniq | toYaml -}}
{{- end -}}

{{/* Egress rules, or public addresses where there are none. Takes a list: what has "root", the rules, the ports. */}}
{{- define "millstream.publicRules" -}}
{{- if index . 1 -}}
{{- index . 1 | toYaml -}}
{{- else -}}
- to:
    {{- (index . 0).root.Values.networkPolicy.publicAddresses | toYaml | nindent 4 }}
  ports:
    {{- range slice . 2 }}
    - {protocol: TCP, port: {{ . }}}
    {{- end }}
{{- end -}}
{{- end -}}

{{/* Contains "true" if a Job fetches a model. Takes the root context. */}}
{{- define "millstream.jobs" -}}
{{- range include "millstream.servedModels" . | fromYaml -}}{{- include "millstream.byJob" . -}}{{- end -}}
{{- end -}}

{{- define "millstream.checkNetwork" -}}
{{- $net := .Values.networkPolicy -}}
{{- if $net.enabled -}}
{{- range $pool := include "millstream.pools" . | fromYamlArray -}}
{{- with $pool.settings.otlp_endpoint -}}
{{- if not $net.tracing }}
{{ $pool.path }}.settings.otlp_endpoint is {{ . }}, but no NetworkPolicy lets spans out; say in networkPolicy.tracing where the collector is
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and .Values.discovery.extraWorkers (not $net.extraEgress.processor) }}
discovery.extraWorkers has {{ len .Values.discovery.extraWorkers }} entries, but no NetworkPolicy lets the Processor reach them; add a rule to networkPolicy.extraEgress.processor
{{- end -}}
{{- end -}}
{{- end -}}
