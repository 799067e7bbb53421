{{/*
Refuses autoscaling that can't work, with a sentence. Takes (dict "root" $ "pool" $pool).
*/}}
{{- define "millstream.checkAutoscaling" -}}
{{- $pool := .pool -}}
{{- $scaling := $pool.autoscaling -}}
{{- $at := printf "%s.autoscaling" $pool.path -}}
{{- $given := include "millstream.givenReplicas" . -}}
{{- if $given -}}
{{- fail (printf "%s.replicas is %s and %s.kind is %s: two owners of one number. Remove replicas, or set %s.kind to none." $pool.path $given $at $scaling.kind $at) -}}
{{- end -}}
{{- if gt (int $scaling.minReplicas) (int $scaling.maxReplicas) -}}
{{- fail (printf "%s: minReplicas is %d and maxReplicas is %d; the maximum must not be smaller." $at (int $scaling.minReplicas) (int $scaling.maxReplicas)) -}}
{{- end -}}
{{- if eq $scaling.kind "hpa" -}}
{{- if not $scaling.metrics -}}
{{- fail (printf "%s.kind is hpa and %s.metrics is empty: name at least one metric." $at $at) -}}
{{- end -}}
{{- else -}}
{{- if not (.root.Capabilities.APIVersions.Has "keda.sh/v1alpha1/ScaledObject") -}}
{{- fail (printf "%s.kind is keda, but this cluster has no ScaledObject: install KEDA, or set the kind to hpa or none (helm template: add --api-versions keda.sh/v1alpha1/ScaledObject)." $at) -}}
{{- end -}}
{{- if not .root.Values.monitoring.prometheus.url -}}
{{- fail (printf "%s.kind is keda, which asks Prometheus: set monitoring.prometheus.url." $at) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/*
The replicas that a user asked for, empty if none. Of workers: a number in the role's or the pool's
values; of the Processor: one that isn't the chart's own 2. Takes (dict "root" $ "pool" $pool).
*/}}
{{- define "millstream.givenReplicas" -}}
{{- if .pool.worker -}}
{{- $section := index .root.Values .pool.role -}}
{{- $own := index $section.pools .pool.name | default dict -}}
{{- $own.replicas | default $section.replicas | default "" -}}
{{- else if ne (int .pool.replicas) 2 -}}
{{- .pool.replicas -}}
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
    - {type: Pods, value: {{ $down.pods }}, periodSeconds: {{ min (include "millstream.graceSeconds" . | int) 1800 }}}
{{- end -}}

{{/*
KEDA's triggers of a pool: rules/scalers.yaml, filled in. Takes (dict "root" $ "pool" $pool).
*/}}
{{- define "millstream.scaleTriggers" -}}
{{- $root := .root -}}
{{- $pool := .pool -}}
{{- $served := (index $root.Values.models $pool.model | default dict).servedName | default $pool.model -}}
{{- $sharing := 0 -}}
{{- range include "millstream.pools" $root | fromYamlArray -}}
{{- if and (eq .role $pool.role) (eq .model $pool.model) -}}
{{- $sharing = add1 $sharing -}}
{{- end -}}
{{- end -}}
{{- $text := $root.Files.Get "rules/scalers.yaml" -}}
{{- range $name, $value := dict "scope" (include "millstream.metricScope" $root) "role" $pool.role "pool" $pool.name "model" $served "pools" $sharing -}}
{{- $text = replace (printf "${%s}" $name) (toString $value) $text -}}
{{- end -}}
{{- $queries := index (fromYaml $text) $pool.role -}}
{{- $triggers := list -}}
{{- range $name, $target := $pool.autoscaling.targets -}}
{{- if $target -}}
{{- $query := index $queries $name | required (printf "%s.autoscaling.targets: a pool of role %s has no target %q; there are: %s." $pool.path $pool.role $name (keys $queries | sortAlpha | join ", ")) -}}
{{- $metadata := merge (dict "serverAddress" $root.Values.monitoring.prometheus.url "query" $query.query "threshold" (toString $target)) $root.Values.monitoring.prometheus.metadata -}}
{{- $trigger := dict "type" "prometheus" "name" $name "metricType" (ternary "AverageValue" "Value" (eq $query.type "average")) "metadata" $metadata -}}
{{- with $root.Values.monitoring.prometheus.authenticationRef -}}
{{- $_ := set $trigger "authenticationRef" . -}}
{{- end -}}
{{- $triggers = append $triggers $trigger -}}
{{- end -}}
{{- end -}}
{{- $triggers = concat $triggers $pool.autoscaling.triggers -}}
{{- if not $triggers -}}
{{- fail (printf "%s.autoscaling.kind is keda and all its targets are 0: set one, of %s, or add triggers." $pool.path (keys $queries | sortAlpha | join ", ")) -}}
{{- end -}}
{{- toYaml $triggers -}}
{{- end -}}
