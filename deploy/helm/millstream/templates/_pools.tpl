{{/*
Every enabled pool of every role as a YAML list, the Processor first. An entry is the pool's values,
merged from `poolDefaults`, the role's section and the pool's own, and

  role      processor, encode, prefill, decode, diffusion or embedding
  name      the pool's name; the Processor's pool is called main
  fullname  the name of its workload, ConfigMap and disruption budget
  path      where its values are, for sentences about mistakes
  worker    whether it is a worker's pool

Takes the root context; read it with `include "millstream.pools" . | fromYamlArray`. The first call of a
render makes the list and checks all values; the others find it in .Values. What asks for it once a pool
and only reads takes .Values.poolList after such a call: to parse the list each time takes 20 s with 50 pools.
*/}}
{{- define "millstream.pools" -}}
{{- if not (hasKey .Values "madePools") -}}
{{- $_ := include "millstream.makePools" . | set .Values "madePools" -}}
{{- $_ := fromYamlArray .Values.madePools | set .Values "poolList" -}}
{{- include "millstream.checks" . -}}
{{- end -}}
{{- .Values.madePools -}}
{{- end -}}

{{- define "millstream.makePools" -}}
{{- $root := . -}}
{{- $pools := list -}}
{{- include "millstream.dropNulls" .Values.models -}}
{{- if .Values.processor.enabled -}}
{{- $own := omit .Values.processor "enabled" "service" -}}
{{- $pool := mergeOverwrite (deepCopy .Values.poolDefaults) (deepCopy $own) -}}
{{- $about := dict "role" "processor" "name" "main" "worker" false "path" "processor"
  "fullname" (include "millstream.fit" (list $root "processor")) -}}
{{- $pools = append $pools (merge $about $pool) -}}
{{- end -}}
{{- range $role := list "encode" "prefill" "decode" "diffusion" "embedding" -}}
{{- $section := index $root.Values $role -}}
{{- include "millstream.dropNulls" $section.pools -}}
{{- if $section.enabled -}}
{{- $common := omit $section "enabled" "pools" -}}
{{- range $name, $own := $section.pools -}}
{{- $pool := mergeOverwrite (deepCopy $root.Values.poolDefaults) (deepCopy $common) (deepCopy ($own | default dict)) -}}
{{- if kindIs "invalid" $pool.replicas -}}{{- $_ := set $pool "replicas" $root.Values.poolDefaults.replicas -}}{{- end -}}
{{- $about := dict "role" $role "name" $name "worker" true "path" (printf "%s.pools.%s" $role $name)
  "fullname" (include "millstream.fit" (list $root (printf "%s-%s" $role $name))) -}}
{{- $pools = append $pools (merge $about $pool) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $pools | toYaml -}}
{{- end -}}

{{/* Remove what was set to null, by which values take an entry of another values file away: Helm keeps those as nulls. */}}
{{- define "millstream.dropNulls" -}}
{{- range $name, $entry := . -}}
{{- if kindIs "invalid" $entry -}}{{- $_ := unset $ $name -}}{{- end -}}
{{- end -}}
{{- end -}}
