{{- define "millstream.checkAutoscaling" -}}
{{- $root := . -}}
{{- range $pool := include "millstream.pools" . | fromYamlArray -}}
{{- if ne $pool.autoscaling.kind "none" -}}
{{- include "millstream.checkScaling" (dict "root" $root "pool" $pool "at" (printf "%s.autoscaling" $pool.path)) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "millstream.checkScaling" -}}
{{- $scaling := .pool.autoscaling -}}
{{- with include "millstream.givenReplicas" . }}
{{ $.pool.path }}.replicas is {{ . }} and {{ $.at }}.kind is {{ $scaling.kind }}, which are two owners of one number; remove replicas, or set the kind to none
{{- end -}}
{{- if gt (int $scaling.minReplicas) (int $scaling.maxReplicas) }}
{{ .at }}: minReplicas is {{ $scaling.minReplicas }} and maxReplicas is {{ $scaling.maxReplicas }}; the maximum must not be smaller
{{- end -}}
{{- if eq $scaling.kind "hpa" -}}
{{- if not (or .pool.worker $scaling.metrics) }}
{{ .at }}.kind is hpa and its metrics are empty; name at least one
{{- end -}}
{{- else -}}
{{- if not (.root.Capabilities.APIVersions.Has "keda.sh/v1alpha1/ScaledObject") }}
{{ .at }}.kind is keda, and the cluster has no ScaledObject; install KEDA (https://keda.sh), or set the kind to hpa or none. To render without a cluster add --api-versions keda.sh/v1alpha1/ScaledObject
{{- end -}}
{{- if not .root.Values.monitoring.prometheus.url }}
{{ .at }}.kind is keda, which asks Prometheus; set monitoring.prometheus.url
{{- end -}}
{{- $queries := index (.root.Files.Get "rules/scalers.yaml" | fromYaml) .pool.role -}}
{{- $wanted := list -}}
{{- range $name, $target := $scaling.targets -}}
{{- if $target -}}{{- $wanted = append $wanted $name -}}{{- end -}}
{{- if not (hasKey $queries $name) }}
{{ $.at }}.targets.{{ $name }}: a pool of role {{ $.pool.role }} has no such target; there are {{ keys $queries | sortAlpha | join ", " }}
{{- end -}}
{{- end -}}
{{- if not (concat $wanted $scaling.triggers) }}
{{ .at }}.kind is keda and no target is above 0; set one of {{ keys $queries | sortAlpha | join ", " }}, or add triggers
{{- end -}}
{{- end -}}
{{- end -}}

{{/*
The replicas that a user asked for, empty if none, or null. Of workers: a number in the role's or the pool's
values; of the Processor: one that isn't the chart's own 2. Takes (dict "root" $ "pool" $pool).
*/}}
{{- define "millstream.givenReplicas" -}}
{{- if .pool.worker -}}
{{- $section := index .root.Values .pool.role -}}
{{- $own := index $section.pools .pool.name | default dict -}}
{{- hasKey $own "replicas" | ternary $own.replicas $section.replicas | default "" -}}
{{- else if not (has (toString .root.Values.processor.replicas) (list "2" "<nil>")) -}}
{{- .root.Values.processor.replicas -}}
{{- end -}}
{{- end -}}

{{/*
The replicas of a pool's workload. A scaler's number is what it is in the cluster: a manifest without it would set 1 when scaling
is switched on. Empty where there is no cluster to look at (`helm template`). Takes (dict "root" $ "pool" $pool).
*/}}
{{- define "millstream.replicas" -}}
{{- if eq .pool.autoscaling.kind "none" -}}
{{- int .pool.replicas -}}
{{- else -}}
{{- $target := include "millstream.scaleTarget" .pool | fromYaml -}}
{{- with lookup $target.apiVersion $target.kind .root.Release.Namespace "" -}}
{{- $replicas := int $.pool.autoscaling.minReplicas -}}
{{- range .items -}}
{{- if eq .metadata.name $target.name -}}{{- $replicas = int .spec.replicas -}}{{- end -}}
{{- end -}}
{{- $replicas -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* What is scaled. Takes a pool. */}}
{{- define "millstream.scaleTarget" -}}
{{- $wide := gt (int .parallelism.nodes) 1 -}}
apiVersion: {{ ternary "leaderworkerset.x-k8s.io/v1" "apps/v1" $wide }}
kind: {{ ternary "LeaderWorkerSet" "Deployment" $wide }}
name: {{ .fullname }}
{{- end -}}

{{/*
How fast replicas come and go. A worker that is taken away drains first, and its GPU is free only
then: the next goes after a drain's time at the earliest, so that a wrong decision is seen before
it is repeated. Takes (dict "root" $ "pool" $pool).
*/}}
{{- define "millstream.scaleBehavior" -}}
{{- $up := .pool.autoscaling.scaleUp -}}
{{- $down := .pool.autoscaling.scaleDown -}}
scaleUp:
  stabilizationWindowSeconds: {{ $up.stabilizationSeconds }}
  policies:
    - {type: Pods, value: {{ $up.pods }}, periodSeconds: {{ $up.periodSeconds }}}
scaleDown:
  stabilizationWindowSeconds: {{ $down.stabilizationSeconds }}
  policies:
    # 1800 is the longest that Kubernetes takes.
    - {type: Pods, value: {{ $down.pods }}, periodSeconds: {{ min (include "millstream.grace" . | int) 1800 }}}
{{- end -}}

{{/* The labels of a pool's recorded demand. Takes (dict "root" $ "pool" $pool). */}}
{{- define "millstream.demandLabels" -}}
release: {{ .root.Release.Name | quote }}
component: {{ .pool.role }}
pool: {{ .pool.name | quote }}
{{- end -}}

{{/* The group of rules that record the demand of pools with hpa; empty where none is. Takes the root context. */}}
{{- define "millstream.demandGroup" -}}
{{- $rules := list -}}
{{- range $pool := include "millstream.pools" . | fromYamlArray -}}
{{- if and $pool.worker (eq $pool.autoscaling.kind "hpa") (not $pool.autoscaling.metrics) -}}
{{- $both := dict "root" $ "pool" $pool -}}
{{- $labels := include "millstream.demandLabels" $both | fromYaml | merge (dict "namespace" $.Release.Namespace) -}}
{{- $queries := include "millstream.scaleQueries" (merge (dict "file" "demand") $both) | fromYaml -}}
{{- $rules = append $rules (dict "record" "millstream:pool_demand" "expr" (index $queries $pool.role) "labels" $labels) -}}
{{- end -}}
{{- end -}}
{{- with $rules -}}{{- dict "name" "millstream-demand" "rules" . | toYaml -}}{{- end -}}
{{- end -}}

{{/* A file of rules/ about pools, filled in for one. Takes (dict "root" $ "pool" $pool "file" "scalers"). */}}
{{- define "millstream.scaleQueries" -}}
{{- $root := .root -}}
{{- $pool := .pool -}}
{{- $served := (index $root.Values.models $pool.model | default dict).servedName | default $pool.model -}}
{{- $sharing := 0 -}}
{{- range include "millstream.pools" $root | fromYamlArray -}}
{{- if and (eq .role $pool.role) (eq .model $pool.model) -}}
{{- $sharing = add1 $sharing -}}
{{- end -}}
{{- end -}}
{{- $text := $root.Files.Get (printf "rules/%s.yaml" .file) -}}
{{- range $name, $value := dict "scope" (include "millstream.metricScope" $root) "role" $pool.role "pool" $pool.name "model" $served "pools" $sharing -}}
{{- $text = replace (printf "${%s}" $name) (toString $value) $text -}}
{{- end -}}
{{- $text -}}
{{- end -}}

{{/* KEDA's triggers of a pool: rules/scalers.yaml, filled in. Takes (dict "root" $ "pool" $pool). */}}
{{- define "millstream.scaleTriggers" -}}
{{- $root := .root -}}
{{- $pool := .pool -}}
{{- $queries := index (include "millstream.scaleQueries" (merge (dict "file" "scalers") .) | fromYaml) $pool.role -}}
{{- $triggers := list -}}
{{- range $name, $target := $pool.autoscaling.targets -}}
{{- if $target -}}
{{- $query := index $queries $name -}}
{{- $metadata := merge (dict "serverAddress" $root.Values.monitoring.prometheus.url "query" $query.query "threshold" (toString $target)) $root.Values.monitoring.prometheus.metadata -}}
{{- $trigger := dict "type" "prometheus" "name" $name "metricType" (ternary "AverageValue" "Value" (eq $query.type "average")) "metadata" $metadata -}}
{{- with $root.Values.monitoring.prometheus.authenticationRef -}}
{{- $_ := set $trigger "authenticationRef" . -}}
{{- end -}}
{{- $triggers = append $triggers $trigger -}}
{{- end -}}
{{- end -}}
{{- concat $triggers $pool.autoscaling.triggers | toYaml -}}
{{- end -}}
