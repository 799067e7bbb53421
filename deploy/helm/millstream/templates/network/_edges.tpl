{{/*
Who of the release connects to whom, as a YAML list of {name, from, to, ports}; `from` and `to` are
{components, labels}, and `from` opens the connection. Takes the root context.

  - the Processor to workers, the pod of `helm test` to the Processor;
  - prefill and decode workers of a model, both ways: the decode worker asks the prefill worker's
    bootstrap server, each tells the other's ZMQ socket how far it is, NIXL connects from the side
    that writes;
  - workers that run prompts to encode workers, for tickets and embeddings; NIXL may answer with a
    connection of its own;
  - the pods of an engine that spans nodes.
*/}}
{{- define "millstream.edges" -}}
{{- $root := . -}}
- name: to-workers
  from: {components: [processor]}
  to: {components: [encode, prefill, decode, diffusion, embedding]}
  ports: [grpc]
- name: to-processor
  from: {components: [test]}
  to: {components: [processor]}
  ports: [grpc]
{{- $models := dict -}}
{{- range $pool := include "millstream.pools" . | fromYamlArray -}}
{{- if $pool.worker -}}
{{- $mode := (include "millstream.settings" (dict "root" $root "pool" $pool) | fromYaml).mode | default "" -}}
{{- $roles := index $models $pool.model | default dict -}}
{{- $part := eq $mode "aggregated" | ternary "aggregated" $pool.role -}}
{{- $_ := set $models $pool.model (set $roles $part true) -}}
{{- if gt (int $pool.parallelism.nodes) 1 }}
{{- $group := dict "components" (list $pool.role) "labels" (dict "millstream.io/pool" $pool.name) }}
- {{ dict "name" (printf "group-%s-%s" $pool.role $pool.name) "from" $group "to" $group "ports" (list "all") | toJson }}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $model, $roles := $models -}}
{{- $of := dict "millstream.io/model" $model -}}
{{- $prefill := dict "components" (list "prefill") "labels" $of -}}
{{- $decode := dict "components" (list "decode") "labels" $of -}}
{{- $encode := dict "components" (list "encode") "labels" $of -}}
{{- if and $roles.prefill $roles.decode }}
- {{ dict "name" (printf "kv-%s" $model) "from" $decode "to" $prefill "ports" (list "engine") | toJson }}
- {{ dict "name" (printf "kv-%s-back" $model) "from" $prefill "to" $decode "ports" (list "engine") | toJson }}
{{- end -}}
{{- range $part, $from := dict "prefill" $prefill "aggregated" $decode -}}
{{- if and $roles.encode (index $roles $part) }}
- {{ dict "name" (printf "embeddings-%s-%s" $part $model) "from" $from "to" $encode "ports" (list "grpc" "engine") | toJson }}
- {{ dict "name" (printf "embeddings-%s-%s-back" $part $model) "from" $encode "to" $from "ports" (list "engine") | toJson }}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/*
Rules for what a pool's pods call outside of the release, as a YAML list; `null` where there is
nothing. Takes (dict "root" $ "pool" $pool).
*/}}
{{- define "millstream.outside" -}}
{{- $net := .root.Values.networkPolicy -}}
{{- $pool := .pool -}}
{{- $settings := include "millstream.settings" . | fromYaml -}}
{{- $rules := index $net.extraEgress $pool.role | default list -}}
{{- range (include "millstream.modelParts" . | fromYaml).init -}}
{{- if eq (first .args) "fetch" -}}
{{- $rules = concat $rules $net.modelHub | uniq -}}
{{- end -}}
{{- end -}}
{{- if $settings.storage_url -}}
{{- $rules = concat $rules $net.storage -}}
{{- end -}}
{{- if $settings.otlp_endpoint -}}
{{- if not $net.tracing -}}
{{- fail (printf "%s.settings.otlp_endpoint is %s, but no NetworkPolicy lets spans out: say in networkPolicy.tracing where the collector is." $pool.path $settings.otlp_endpoint) -}}
{{- end -}}
{{- $rules = concat $rules $net.tracing -}}
{{- end -}}
{{- if not $pool.worker -}}
{{- if $settings.fetch_urls -}}
{{- $rules = concat $rules $net.clientUrls -}}
{{- end -}}
{{- if eq .root.Values.discovery.kind "endpointslices" -}}
{{- $rules = concat $rules $net.kubernetesApi -}}
{{- end -}}
{{- if and .root.Values.discovery.extraWorkers (not $net.extraEgress.processor) -}}
{{- fail (printf "discovery.extraWorkers has %d entries, but no NetworkPolicy lets the Processor reach them: add a rule to networkPolicy.extraEgress.processor." (len .root.Values.discovery.extraWorkers)) -}}
{{- end -}}
{{- end -}}
{{- toYaml $rules -}}
{{- end -}}
