{{- define "culvert.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else if contains "culvert" .Release.Name -}}
{{- .Release.Name -}}
{{- else -}}
{{- printf "%s-culvert" .Release.Name -}}
{{- end -}}
{{- end -}}

{{/* A name of an object of the whole cluster, which another release must not have. */}}
{{- define "culvert.clusterName" -}}
{{- printf "%s:%s" .Release.Namespace (include "culvert.fullname" .) -}}
{{- end -}}

{{- define "culvert.gatewayAccount" -}}
{{- .Values.serviceAccount.name | default (include "culvert.fullname" .) -}}
{{- end -}}

{{- define "culvert.dnsAccount" -}}
{{- printf "%s-dns" (include "culvert.gatewayAccount" .) -}}
{{- end -}}

{{/* What pods are selected by: never changed. Of (list $ component). */}}
{{- define "culvert.selector" -}}
app.kubernetes.io/name: culvert
app.kubernetes.io/instance: {{ (index . 0).Release.Name | quote }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{- define "culvert.labels" -}}
{{ include "culvert.selector" . }}
app.kubernetes.io/version: {{ (index . 0).Chart.AppVersion | quote }}
app.kubernetes.io/part-of: culvert
{{- with (index . 0).Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "culvert.image" -}}
{{- if .Values.image.digest -}}
{{- printf "%s@%s" .Values.image.repository .Values.image.digest -}}
{{- else -}}
{{- printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) -}}
{{- end -}}
{{- end -}}

{{/* Whether anything is learnt from Kubernetes. */}}
{{- define "culvert.kubernetes" -}}
{{- if or .Values.discovery.enabled .Values.gatewayAPI.enabled .Values.authorizationPolicies.enabled -}}true{{- end -}}
{{- end -}}

{{/* Whether imports have ClusterIPs that lead to the gateway. */}}
{{- define "culvert.importedServices" -}}
{{- if and .Values.multiCluster.enabled .Values.multiCluster.importedServices.enabled -}}true{{- end -}}
{{- end -}}

{{/* What pods of a component share. Of (list $ component values). */}}
{{- define "culvert.podPlacement" -}}
{{- $root := index . 0 -}}
{{- $component := index . 1 -}}
{{- $v := index . 2 -}}
# Nothing here is found by the variables of other Services.
enableServiceLinks: false
{{- with $root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $v.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with $v.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $v.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $v.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if and $v.topologySpread (ne ($v.kind | default "Deployment") "DaemonSet") }}
topologySpreadConstraints:
  {{- range list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
  - maxSkew: 1
    topologyKey: {{ . }}
    whenUnsatisfiable: ScheduleAnyway
    matchLabelKeys: [pod-template-hash]
    labelSelector:
      matchLabels:
        {{- include "culvert.selector" (list $root $component) | nindent 8 }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* Probes of the health port, which answers from the start: readiness waits for the first table. */}}
{{- define "culvert.probes" -}}
livenessProbe:
  httpGet: {path: /healthz, port: health}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
readinessProbe:
  httpGet: {path: /readyz, port: health}
  periodSeconds: 2
  timeoutSeconds: 2
  failureThreshold: 2
{{- end -}}
