{{/* hf, s3, pvc, oci, file, or nothing where there are no files (simulated engines). Takes a URI. */}}
{{- define "millstream.scheme" -}}
{{- if contains "://" . -}}{{- splitList "://" . | first -}}{{- end -}}
{{- end -}}

{{/* Where workers find a model's files; empty: it has none. Takes (dict "model" $model "name" $key). */}}
{{- define "millstream.modelDirectory" -}}
{{- $scheme := include "millstream.scheme" (.model.uri | default "") -}}
{{- if eq $scheme "file" -}}
{{- trimPrefix "file://" .model.uri -}}
{{- else if $scheme -}}
{{- printf "/models/%s" .name -}}
{{- end -}}
{{- end -}}

{{/* Where the Processor finds tokenizer and configuration. */}}
{{- define "millstream.tokenizerDirectory" -}}
{{- include "millstream.modelDirectory" (dict "name" .name "model" (dict "uri" (.model.tokenizerUri | default .model.uri))) -}}
{{- end -}}

{{/*
The models that pools serve, by key, each with `pools` (how many) and `tokenizer` (whether the
Processor needs its tokenizer: not for images and videos). Takes the root context.
*/}}
{{- define "millstream.servedModels" -}}
{{- $root := . -}}
{{- $served := dict -}}
{{- $_ := include "millstream.pools" . -}}
{{- range $pool := .Values.poolList -}}
{{- if and $pool.worker (hasKey $root.Values.models $pool.model) -}}
{{- $tokenizer := ne (include "millstream.makesMedia" (dict "pool" $pool)) "true" -}}
{{- $_ := set $served $pool.model (merge (dict "tokenizer" $tokenizer) (index $root.Values.models $pool.model)) -}}
{{- end -}}
{{- end -}}
{{- $served | toYaml -}}
{{- end -}}

{{/* The URI with its revision, as `model_files fetch` takes it. Takes a model. */}}
{{- define "millstream.fetchUri" -}}
{{- if and .revision (hasPrefix "hf://" .uri) -}}
{{- printf "%s@%s" .uri .revision -}}
{{- else -}}
{{- .uri -}}
{{- end -}}
{{- end -}}

{{/* "true" if a Job fetches the model into a claim. Takes a model. */}}
{{- define "millstream.byJob" -}}
{{- if and (has (include "millstream.scheme" (.uri | default "")) (list "hf" "s3")) (eq (.download | default "pod") "job") -}}true{{- end -}}
{{- end -}}

{{/*
The claim of a model that a Job fetches. It stays the same whatever its files are, since Helm deletes at once what a new version
doesn't name, and then can't roll back. Takes (list $root $key).
*/}}
{{- define "millstream.claim" -}}
{{- $key := index . 1 -}}
{{- include "millstream.fit" (list (index . 0) (printf "model-%s-%s" (include "millstream.cut" (list $key 12)) (sha256sum $key | trunc 8))) -}}
{{- end -}}

{{/* The directory in that claim of one URI and revision: pods of before an upgrade keep theirs. Takes a model. */}}
{{- define "millstream.claimDirectory" -}}
{{- include "millstream.fetchUri" . | sha256sum | trunc 12 -}}
{{- end -}}

{{/* A container that runs `model_files`. Takes (dict "root" "name" "image" "pullPolicy" "args" "model" "mounts"). */}}
{{- define "millstream.filesContainer" -}}
name: {{ .name }}
image: {{ include "millstream.image" (dict "root" .root "image" .image) | quote }}
imagePullPolicy: {{ (index .root.Values.image .image).pullPolicy }}
args: {{ concat (list "python" "-m" "millstream_server.model_files") .args | toJson }}
{{- $env := list (dict "name" "HOME" "value" "/home/millstream") }}
{{- if eq (first .args) "fetch" }}
{{- with .model.tokenSecret }}
{{- $reference := dict "name" .name "key" (.key | default "token") }}
{{- $env = append $env (dict "name" "HF_TOKEN" "valueFrom" (dict "secretKeyRef" $reference)) }}
{{- end }}
{{- $env = concat $env .root.Values.downloads.env (.model.env | default list) }}
{{- with .model.envFrom }}
envFrom:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
env:
  {{- include "millstream.lastWins" $env | nindent 2 }}
resources:
  {{- toYaml .root.Values.downloads.resources | nindent 2 }}
securityContext:
  {{- include "millstream.containerSecurity" (dict) | nindent 2 }}
volumeMounts:
  - {name: tmp, mountPath: /tmp}
  - {name: home, mountPath: /home/millstream}
  {{- .mounts | toYaml | nindent 2 }}
{{- end -}}

{{/* A model's key for names: without dots, 49 characters at most, and not the same as another's: `a.b` and `a-b` may both be there. */}}
{{- define "millstream.dashed" -}}
{{- include "millstream.cut" (list . 40) | replace "." "-" -}}{{- if or (contains "." .) (gt (len .) 40) }}-{{ sha256sum . | trunc 8 }}{{ end -}}
{{- end -}}

{{/* Volume of a model's files, without its name. Takes (list $root $key $model). */}}
{{- define "millstream.modelVolume" -}}
{{- $model := index . 2 -}}
{{- $scheme := include "millstream.scheme" $model.uri -}}
{{- if eq $scheme "pvc" -}}
persistentVolumeClaim: {claimName: {{ trimPrefix "pvc://" $model.uri | splitList "/" | first | quote }}, readOnly: true}
{{- else if eq $scheme "oci" -}}
image: {reference: {{ trimPrefix "oci://" $model.uri | quote }}, pullPolicy: IfNotPresent}
{{- else if include "millstream.byJob" $model -}}
persistentVolumeClaim: {claimName: {{ include "millstream.claim" (list (index . 0) (index . 1)) }}, readOnly: true}
{{- else if $model.storageClass -}}
ephemeral:
  volumeClaimTemplate:
    {{- with (index . 0).Values }}
    {{- if or .commonLabels .commonAnnotations }}
    metadata: {{ dict "labels" .commonLabels "annotations" .commonAnnotations | toJson }}
    {{- end }}
    {{- end }}
    spec:
      accessModes: {{ $model.accessModes | default (list "ReadWriteOnce") | toJson }}
      storageClassName: {{ $model.storageClass | quote }}
      resources: {requests: {storage: {{ $model.size }}}}
{{- else -}}
emptyDir: {{ with $model.size }}{sizeLimit: {{ . }}}{{ else }}{}{{ end }}
{{- end -}}
{{- end -}}

{{/* What a pod mounts of a model, without the volume's name. Takes a model and its key; with "whole" the claim that a Job fills, and
not the model's directory in it, which may not be there yet. */}}
{{- define "millstream.modelMount" -}}
mountPath: {{ printf "/models/%s" .name | quote }}
{{- if eq (include "millstream.scheme" .model.uri) "pvc" }}
{{- with trimPrefix "pvc://" .model.uri | splitList "/" | rest | join "/" }}
subPath: {{ . | quote }}
{{- end }}
{{- else if and (include "millstream.byJob" .model) (not .whole) }}
subPath: {{ include "millstream.claimDirectory" .model | quote }}
{{- end }}
{{- if .readOnly }}
readOnly: true
{{- end }}
{{- end -}}

{{/*
How a pod gets at its models, as {volumes, mounts, init}. A worker has one, with weights. The
Processor fetches the tokenizer files of each into one volume; of claims and image volumes it mounts
the whole. Takes (dict "root" $ "pool" $pool).
*/}}
{{- define "millstream.modelParts" -}}
{{- $root := .root -}}
{{- $image := include "millstream.imageOf" . -}}
{{- $volumes := list -}}{{- $mounts := list -}}{{- $init := list -}}
{{- $claims := dict -}}{{- /* the volume of each: a claim that a pod names twice is never mounted */ -}}
{{- $models := include "millstream.servedModels" $root | fromYaml -}}
{{- if .pool.worker -}}{{- $models = pick $models .pool.model -}}{{- end -}}
{{- range $key, $model := $models -}}
{{- if not $.pool.worker -}}{{- $model = merge (dict "uri" ($model.tokenizerUri | default $model.uri)) $model -}}{{- end -}}
{{- $scheme := include "millstream.scheme" ($model.uri | default "") -}}
{{- $fetched := has $scheme (list "hf" "s3") -}}
{{- $needed := and $scheme (ne $scheme "file") (or $.pool.worker $model.tokenizer) -}}
{{- $about := dict "root" $root "image" $image "model" $model -}}
{{- if and $needed (or $.pool.worker (not $fetched)) -}}
{{- $source := include "millstream.modelVolume" (list $root $key $model) | fromYaml -}}
{{- $claim := dig "persistentVolumeClaim" "claimName" "" $source -}}
{{- $volume := index $claims $claim | default (printf "model-%s" (include "millstream.dashed" $key)) -}}
{{- $mount := dict "name" $volume -}}
{{- $wait := include "millstream.byJob" $model | eq "true" -}}
{{- if not (hasKey $claims $claim) -}}
{{- $volumes = append $volumes (merge (dict "name" $volume) $source) -}}
{{- if $claim -}}{{- $_ := set $claims $claim $volume -}}{{- end -}}
{{- end -}}
{{- $mounts = append $mounts (include "millstream.modelMount" (dict "model" $model "name" $key "readOnly" true) | fromYaml | merge $mount) -}}
{{- if $fetched -}}
{{- $there := include "millstream.modelMount" (dict "model" $model "name" $key "readOnly" $wait "whole" true) | fromYaml | merge (dict "name" $volume) -}}
{{- $args := $wait | ternary (list "wait" (printf "/models/%s/%s" $key (include "millstream.claimDirectory" $model))) (list "fetch" (include "millstream.fetchUri" $model) (printf "/models/%s" $key)) -}}
{{- $init = append $init (merge (dict "name" ($wait | ternary "wait-for-model" "fetch-model") "args" $args "mounts" (list $there)) $about) -}}
{{- end -}}
{{- else if $needed -}}
{{- if not $init -}}
{{- $volumes = append $volumes (dict "name" "models" "emptyDir" (dict "sizeLimit" "4Gi")) -}}
{{- end -}}
{{- $mounts = append $mounts (dict "name" "models" "mountPath" (printf "/models/%s" $key) "subPath" $key "readOnly" true) -}}
{{- $args := list "fetch" (include "millstream.fetchUri" $model) (printf "/models/%s" $key) "--without-weights" -}}
{{- $init = append $init (merge (dict "name" (printf "fetch-%s" (include "millstream.dashed" $key)) "args" $args "mounts" (list (dict "name" "models" "mountPath" "/models"))) $about) -}}
{{- end -}}
{{- end -}}
{{- $containers := list -}}
{{- range $init -}}{{- $containers = append $containers (include "millstream.filesContainer" . | fromYaml) -}}{{- end -}}
{{- dict "volumes" $volumes "mounts" $mounts "init" $containers | toYaml -}}
{{- end -}}
