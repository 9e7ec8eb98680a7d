{{- define "retrieval.name" -}}
{{- printf "%s-retrieval" .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "retrieval.selector" -}}
app.kubernetes.io/name: retrieval
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "retrieval.labels" -}}
{{ include "retrieval.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}
