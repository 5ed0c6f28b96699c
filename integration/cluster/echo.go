package cluster

import (
	"bufio"
	"cmp"
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"strings"
	"testing"
	"text/template"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"culvert.dev/internal/testca"
)

// An Echo is a Deployment of the server of the Gateway API's conformance suite,
// which says of a request which pod has it, and the Service of its name.
type Echo struct {
	Namespace string // which is made; "" means "default"
	Name      string // "" means "echo"
	Replicas  int    // 0 means 1
	Exposed   bool   // by the Service's annotation
	Headless  bool   // the Service has no address

	// CA issues its certificate for Hosts, and those of its clients: it is at port
	// 443. Without, it is at port 80, and speaks plain HTTP.
	CA    *testca.CA
	Hosts []string
}

var echoManifests = template.Must(template.New("echo").Funcs(template.FuncMap{"base64": base64.StdEncoding.EncodeToString}).Parse(`
apiVersion: v1
kind: Namespace
metadata: {name: {{.Namespace}}}
---
{{- with .Pair}}
apiVersion: v1
kind: Secret
metadata: {name: {{$.Name}}, namespace: {{$.Namespace}}}
data: {tls.crt: {{base64 .CertPEM}}, tls.key: {{base64 .KeyPEM}}, ca.crt: {{base64 $.CA.CertPEM}}}
---
{{- end}}
apiVersion: apps/v1
kind: Deployment
metadata: {name: {{.Name}}, namespace: {{.Namespace}}}
spec:
  replicas: {{.Replicas}}
  selector: {matchLabels: {app: {{.Name}}}}
  template:
    metadata: {labels: {app: {{.Name}}}}
    spec:
      terminationGracePeriodSeconds: 1
      containers:
      - name: echo
        image: registry.k8s.io/gateway-api/echo-basic:v1.5.1
        ports: [{name: web, containerPort: {{if .CA}}8443{{else}}3000{{end}}}]
        env:
        - {name: POD_NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
        - {name: NAMESPACE, valueFrom: {fieldRef: {fieldPath: metadata.namespace}}}
{{- if .CA}}
        - {name: TLS_SERVER_CERT, value: /etc/tls/tls.crt}
        - {name: TLS_SERVER_PRIVKEY, value: /etc/tls/tls.key}
        - {name: TLS_CLIENT_CACERTS, value: /etc/tls/ca.crt}
        volumeMounts: [{name: tls, mountPath: /etc/tls}]
      volumes: [{name: tls, secret: {secretName: {{.Name}}}}]
{{- end}}
---
apiVersion: v1
kind: Service
metadata:
  name: {{.Name}}
  namespace: {{.Namespace}}
{{- if .Exposed}}
  annotations: {culvert.dev/expose: "true"}
{{- end}}
spec:
{{- if .Headless}}
  clusterIP: None
{{- end}}
  selector: {app: {{.Name}}}
  ports: [{{if .CA}}{name: https, port: 443, targetPort: web}{{else}}{name: http, port: 80, targetPort: web}{{end}}]
`))

// RunEcho makes what is there like e, and does not wait for the pods.
func (c *Cluster) RunEcho(t testing.TB, e Echo) {
	t.Helper()
	e.Namespace, e.Name, e.Replicas = cmp.Or(e.Namespace, "default"), cmp.Or(e.Name, "echo"), cmp.Or(e.Replicas, 1)
	var pair *testca.Pair
	if e.CA != nil {
		var err error
		id := "spiffe://" + e.CA.TrustDomain + "/ns/" + e.Namespace + "/sa/" + e.Name
		if pair, err = e.CA.Issue(testca.Options{SPIFFEID: id, DNSNames: e.Hosts, Usage: testca.ServerOnly}); err != nil {
			t.Fatal(err)
		}
	}
	var docs strings.Builder
	if err := echoManifests.Execute(&docs, struct {
		Echo
		Pair *testca.Pair
	}{e, pair}); err != nil {
		t.Fatal(err)
	}
	c.Apply(t, docs.String())
}

// Scale gives a Deployment another number of pods.
func (c *Cluster) Scale(t testing.TB, namespace, deployment string, replicas int) {
	t.Helper()
	patch := fmt.Sprintf(`{"spec":{"replicas":%d}}`, replicas)
	if _, err := c.Client.AppsV1().Deployments(namespace).Patch(t.Context(), deployment, types.MergePatchType, []byte(patch), metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
}

// An Echoed is what the server says of a request.
type Echoed struct {
	Pod, Namespace string
	TLS            struct {
		PeerCertificates []string // of the client, in PEM
	}
}

// answerTime is far more than an answer takes on a busy machine.
const answerTime = 10 * time.Second

// AskEcho makes a request on a connection to the server, which is of no use
// after that, and is the caller's to close. It takes answerTime at most.
func AskEcho(conn net.Conn) (e Echoed, err error) {
	if err := conn.SetDeadline(time.Now().Add(answerTime)); err != nil {
		return e, err
	}
	if _, err := fmt.Fprint(conn, "GET / HTTP/1.0\r\n\r\n"); err != nil {
		return e, err
	}
	res, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		return e, err
	}
	defer res.Body.Close()
	if res.StatusCode != http.StatusOK {
		return e, fmt.Errorf("the echo server answers with %s", res.Status)
	}
	err = json.NewDecoder(res.Body).Decode(&e)
	return e, err
}

// Tunnel asks a gateway for a target by CONNECT, within answerTime. The caller
// closes the connection; what is behind it must not speak first.
func Tunnel(ctx context.Context, gateway, target string) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, answerTime)
	defer cancel()
	conn, err := new(net.Dialer).DialContext(ctx, "tcp", gateway)
	if err != nil {
		return nil, err
	}
	_ = conn.SetDeadline(time.Now().Add(answerTime))
	fmt.Fprintf(conn, "CONNECT %[1]s HTTP/1.1\r\nHost: %[1]s\r\n\r\n", target)
	res, err := http.ReadResponse(bufio.NewReader(conn), &http.Request{Method: http.MethodConnect})
	if err == nil && res.StatusCode != http.StatusOK {
		err = fmt.Errorf("CONNECT %s: %s", target, res.Status)
	}
	if err != nil {
		conn.Close()
		return nil, err
	}
	return conn, nil
}
