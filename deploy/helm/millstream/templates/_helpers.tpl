{{- define "millstream.name" -}}
{{- include "millstream.cut" (list (default .Chart.Name .Values.nameOverride) 40) -}}
{{- end -}}

{{/* The beginning of all names. With a letter first: a Service's name must have one. */}}
{{- define "millstream.fullname" -}}
{{- $name := include "millstream.name" . -}}
{{- $whole := contains $name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name $name) -}}
{{- regexReplaceAll "^[0-9]" (.Values.fullnameOverride | default $whole | replace "." "-") "r${0}" -}}
{{- end -}}

{{/* The first characters of a name, without a dash or dot at the end. Takes (list "name" 40). */}}
{{- define "millstream.cut" -}}
{{- regexReplaceAll "[-.]+$" (index . 0 | trunc (index . 1)) "" -}}
{{- end -}}

{{/* `<fullname>-<suffix>`, at most 46 characters, which leaves room for what Kubernetes and LeaderWorkerSet
append to the names of pods. A longer fullname is cut and gets a digest, so that two long releases
never share a name. Takes (list $root "suffix"), of at most 32 characters. */}}
{{- define "millstream.fit" -}}
{{- $base := include "millstream.fullname" (index . 0) -}}
{{- $suffix := index . 1 | replace "." "-" -}}
{{- $room := sub 45 (len $suffix) | int -}}
{{- if gt (len $base) $room -}}
{{- $base = printf "%s-%s" (include "millstream.cut" (list $base (int (sub $room 9)))) (sha256sum $base | trunc 8) -}}
{{- end -}}
{{- printf "%s-%s" $base $suffix -}}
{{- end -}}

{{/* Labels of the release; every object has them. Values are in quotes: a release may be called 1, a pool
"true". Takes the root context. */}}
{{- define "millstream.labels" -}}
app.kubernetes.io/name: {{ include "millstream.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/part-of: millstream
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* The metadata of an object: the release's labels and annotations, under its own. Takes (dict "root" $ "name" "…"), and where the
object has them "namespace", "labels", "annotations". */}}
{{- define "millstream.metadata" -}}
{{- if or (gt (len .name) 253) (not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" .name)) -}}
{{- printf "%q can't be the name of an object; shorten fullnameOverride" .name | fail -}}
{{- end -}}
name: {{ .name | quote }}
namespace: {{ .namespace | default .root.Release.Namespace | quote }}
{{ include "millstream.tags" . }}
{{- end -}}

{{/* The part of it that what the cluster makes of an object has too. Takes the same. */}}
{{- define "millstream.tags" -}}
labels:
  {{- merge (dict) (.labels | default dict) (include "millstream.labels" .root | fromYaml) | toYaml | nindent 2 }}
{{- with merge (dict) (.annotations | default dict) .root.Values.commonAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* What a pool's pods are selected by. Takes (dict "root" $ "pool" $pool). */}}
{{- define "millstream.selector" -}}
app.kubernetes.io/name: {{ include "millstream.name" .root | quote }}
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .pool.role }}
millstream.io/pool: {{ .pool.name | quote }}
{{- end -}}

{{/* The metadata of a pool's objects but its workload. Takes (dict "root" $ "pool" $pool). */}}
{{- define "millstream.poolMetadata" -}}
{{- include "millstream.metadata" (dict "root" .root "name" .pool.fullname "labels" (include "millstream.poolLabels" . | fromYaml)) -}}
{{- end -}}

{{/* Labels of a pool's objects, beside the release's. Takes (dict "root" $ "pool" $pool). */}}
{{- define "millstream.poolLabels" -}}
app.kubernetes.io/component: {{ .pool.role }}
millstream.io/pool: {{ .pool.name | quote }}
{{- with .pool.model }}
millstream.io/model: {{ . | quote }}
{{- end }}
{{- end -}}

{{/* A list of variables without those that a later one of the same name replaces: Helm 4 refuses duplicates. Takes a list. */}}
{{- define "millstream.lastWins" -}}
{{- $last := dict -}}
{{- range $i, $variable := . -}}{{- $_ := set $last $variable.name $i -}}{{- end -}}
{{- $kept := list -}}
{{- range $i, $variable := . -}}
{{- if eq $i (index $last $variable.name) -}}{{- $kept = append $kept $variable -}}{{- end -}}
{{- end -}}
{{- $kept | toYaml -}}
{{- end -}}

{{/* Where a pod that belongs to no pool may run: as its own values say, else as `poolDefaults`. Takes (dict "root" $ "own" its values). */}}
{{- define "millstream.placement" -}}
{{- $placement := dict -}}
{{- range $name := list "nodeSelector" "tolerations" "priorityClassName" -}}
{{- with index $.own $name | default (index $.root.Values.poolDefaults $name) -}}
{{- $_ := set $placement $name . -}}
{{- end -}}
{{- end -}}
{{- with $placement -}}{{- toYaml . -}}{{- end -}}
{{- end -}}

{{/* Which entry of `image` a pool's pods run. Takes (dict "root" $ "pool" $pool). */}}
{{- define "millstream.imageOf" -}}
{{- if not .pool.worker -}}processor
{{- else -}}{{- eq (include "millstream.engine" .) "vllm" | ternary "workerVllm" "worker" -}}
{{- end -}}
{{- end -}}

{{- define "millstream.image" -}}
{{- $image := index .root.Values.image .image -}}
{{- if $image.digest -}}
{{- printf "%s@%s" $image.repository $image.digest -}}
{{- else -}}
{{- printf "%s:%s" $image.repository ($image.tag | default .root.Chart.AppVersion) -}}
{{- end -}}
{{- end -}}
