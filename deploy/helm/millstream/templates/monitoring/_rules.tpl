{{/*
The groups of rules/*.yaml with ${…} filled in, without the alerts that are turned off, as YAML.
Plain replacement and not `tpl`: Prometheus has its own {{ }} in annotations. Takes the root context.
*/}}
{{- define "millstream.ruleGroups" -}}
{{- $rules := .Values.monitoring.rules -}}
{{- $params := include "millstream.ruleParameters" . | fromYaml -}}
{{- $texts := list -}}
{{- $ratios := .Files.Get "rules/ratios.yaml" -}}
{{- range list "5m" "30m" "1h" "2h" "6h" "1d" -}}
{{- $texts = append $texts ($ratios | replace "${window}" .) -}}
{{- end -}}
{{- range list "objectives" "requests" "workers" -}}
{{- $texts = append $texts ($.Files.Get (printf "rules/%s.yaml" .)) -}}
{{- end -}}
{{- $off := ternary $rules.disabled (append $rules.disabled "MillstreamNoMetrics") .Values.processor.enabled -}}
{{- $groups := list -}}
{{- range $text := $texts -}}
{{- range $name, $value := $params -}}
{{- $text = replace (printf "${%s}" $name) $value $text -}}
{{- end -}}
{{- $group := fromYaml $text -}}
{{- $kept := list -}}
{{- range $rule := $group.rules -}}
{{- if not (has $rule.alert $off) -}}
{{- if $rule.alert -}}
{{- $_ := set $rule "labels" (merge (dict) $rules.alertLabels $rule.labels) -}}
{{- $_ := set $rule.annotations "runbook_url" (printf "%s#%s" $rules.runbookUrl (lower $rule.alert)) -}}
{{- end -}}
{{- $kept = append $kept $rule -}}
{{- end -}}
{{- end -}}
{{- $groups = append $groups (set $group "rules" $kept) -}}
{{- end -}}
{{- with include "millstream.demandGroup" . | fromYaml -}}{{- $groups = append $groups . -}}{{- end -}}
{{- $groups | toYaml -}}
{{- end -}}

{{/* What rules/*.yaml leave open, all strings. Takes the root context. */}}
{{- define "millstream.ruleParameters" -}}
{{- $rules := .Values.monitoring.rules -}}
scope: {{ include "millstream.metricScope" . | quote }}
{{- range $name, $objective := $rules.objectives }}
{{ $name }}Budget: {{ subf 1.0 $objective.goal | printf "%.4g" | quote }}
{{- with $objective.seconds }}
{{ $name }}Seconds: {{ ternary (printf "%.1f" .) (printf "%v" .) (eq (float64 .) (floor .)) | quote }}
{{- end }}
{{- end }}
{{- range $name, $value := $rules.thresholds }}
{{ $name }}: {{ $value | quote }}
{{- end }}
{{- end -}}

{{/* PromQL matchers of this release's series: PodMonitor sets these labels. */}}
{{- define "millstream.metricScope" -}}
{{- .Values.monitoring.scope | default (printf "namespace=%q, job=%q" .Release.Namespace (include "millstream.fullname" .)) -}}
{{- end -}}
