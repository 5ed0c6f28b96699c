package gatewayapi_test

import (
	"bufio"
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"culvert.dev/delegation"
	"culvert.dev/internal/testca"
)

const (
	toldGateway = "spiffe://corp.example/ns/edge/sa/gw"
	toldCaller  = "spiffe://corp.example/ns/web/sa/front"
)

// forwardIdentity has a Service that is told who calls by its annotation, in the TLS of a
// BackendTLSPolicy and signed with the Gateway's client certificate. What can't be told is
// not served.
func (b *bench) forwardIdentity() {
	t := b.t
	ca, err := testca.New("corp.example", nil)
	if err != nil {
		t.Fatal(err)
	}
	issue := func(o testca.Options) *testca.Pair {
		t.Helper()
		p, err := ca.Issue(o)
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	front, end := issue(testca.Options{SPIFFEID: toldCaller}), issue(testca.Options{SPIFFEID: "spiffe://corp.example/ns/edge/sa/end", DNSNames: []string{"told.example.com"}})
	gw := issue(testca.Options{SPIFFEID: toldGateway})
	b.secret("told-end", pair{string(end.CertPEM), string(end.KeyPEM)})
	b.secret("told-client", pair{string(gw.CertPEM), string(gw.KeyPEM)})

	// The service says by whom it was called, and believes the gateway alone.
	v := &delegation.Verifier{Audience: []string{"shop.internal"}, Gateways: []delegation.Gateway{{ID: toldGateway, Roots: ca.Pool()}}}
	own := issue(testca.Options{SPIFFEID: "spiffe://corp.example/ns/shop/sa/api", DNSNames: []string{"shop.internal"}})
	inner, err := net.Listen("tcp", netip.AddrPortFrom(b.backend, 0).String())
	if err != nil {
		t.Fatal(err)
	}
	l := v.Listener(tls.NewListener(inner, &tls.Config{Certificates: []tls.Certificate{own.TLS}, ClientAuth: tls.RequireAnyClientCert}))
	done := make(chan struct{})
	t.Cleanup(func() {
		l.Close()
		<-done
	})
	go func() {
		defer close(done)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				_ = c.SetDeadline(time.Now().Add(settled))
				if a, err := c.(*delegation.Conn).Assertion(); err == nil {
					fmt.Fprintf(c, "%s by %s through %s\n", a.Subject, a.Method, a.Actors)
				}
			}()
		}
	}()
	b.Apply(t, fmt.Sprintf(`
apiVersion: v1
kind: Service
metadata: {name: told, annotations: {culvert.dev/forward-identity: "insideTLS; assertion=true"}}
spec: {ports: [{name: tls, port: 443, targetPort: %[1]d}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: told-1, labels: {kubernetes.io/service-name: told}}
addressType: IPv4
ports: [{name: tls, port: %[1]d, protocol: TCP}]
endpoints: [{addresses: ["%[2]s"], conditions: {ready: true}}]
---
apiVersion: v1
kind: ConfigMap
metadata: {name: told}
data:
  ca.crt: |
    %[3]s
---
apiVersion: gateway.networking.k8s.io/v1
kind: Gateway
metadata: {name: told}
spec:
  gatewayClassName: culvert
  tls:
    frontend: {default: {validation: {caCertificateRefs: [{group: "", kind: ConfigMap, name: told}]}}}
    backend: {clientCertificateRef: {name: told-client}}
  listeners: [{name: end, port: 446, protocol: TLS, tls: {mode: Terminate, certificateRefs: [{name: told-end}]}}]
---
apiVersion: gateway.networking.k8s.io/v1
kind: TLSRoute
metadata: {name: told}
spec:
  parentRefs: [{name: told}]
  hostnames: [told.example.com]
  rules: [{backendRefs: [{name: told, port: 443}]}]
`, inner.Addr().(*net.TCPAddr).Port, b.backend, strings.ReplaceAll(strings.TrimSpace(string(ca.CertPEM)), "\n", "\n    ")))
	address := b.address("told") + ":446"

	// Nothing has the gateway speak TLS to the service, so there is no place for it.
	b.waitParent("tlsroutes", "told", "ResolvedRefs", "False/InvalidAnnotation")
	b.waitRefused(address, "told.example.com")
	b.Apply(t, `
apiVersion: gateway.networking.k8s.io/v1
kind: BackendTLSPolicy
metadata: {name: told}
spec:
  targetRefs: [{group: "", kind: Service, name: told}]
  validation: {hostname: shop.internal, caCertificateRefs: [{group: "", kind: ConfigMap, name: told}]}
`)
	b.waitParent("tlsroutes", "told", "ResolvedRefs", "True/ResolvedRefs")
	answers := func(want string) {
		t.Helper()
		b.Wait(t, settled, func(ctx context.Context) error {
			d := &tls.Dialer{NetDialer: &net.Dialer{Timeout: settled}, Config: &tls.Config{ServerName: "told.example.com", RootCAs: ca.Pool(), Certificates: []tls.Certificate{front.TLS}}}
			c, err := d.DialContext(ctx, "tcp", address)
			if err != nil {
				return err
			}
			defer c.Close()
			_ = c.SetDeadline(time.Now().Add(settled))
			got, err := bufio.NewReader(c).ReadString('\n')
			if err == nil && got != want {
				err = fmt.Errorf("the service was called by %q, want %q", got, want)
			}
			return err
		})
	}
	told := "uri:" + toldCaller + " by mtls through [" + toldGateway + "]\n"
	answers(told)

	annotate := func(value string) {
		t.Helper()
		patch := fmt.Sprintf(`{"metadata":{"annotations":{"culvert.dev/forward-identity":%q}}}`, value)
		if _, err := b.Client.CoreV1().Services("default").Patch(t.Context(), "told", types.MergePatchType, []byte(patch), metav1.PatchOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	annotate("insideTLS; assertion=yes")
	b.waitParent("tlsroutes", "told", "ResolvedRefs", "False/InvalidAnnotation")
	b.waitRefused(address, "told.example.com")
	b.Wait(t, settled, func(ctx context.Context) error {
		events, err := b.Client.CoreV1().Events("default").List(ctx, metav1.ListOptions{FieldSelector: "reason=InvalidAnnotation"})
		if err != nil {
			return err
		}
		for _, e := range events.Items {
			if e.InvolvedObject.Name == "told" && strings.Contains(e.Message, `culvert.dev/forward-identity of Service default/told: "insideTLS; assertion=yes"`) {
				return nil
			}
		}
		return fmt.Errorf("%d Events have the reason, and none the annotation", len(events.Items))
	})
	annotate("insideTLS; assertion=true; audience=shop.internal")
	answers(told)
}
