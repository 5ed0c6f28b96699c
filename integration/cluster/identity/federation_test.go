package identity_test

import (
	"context"
	"crypto/tls"
	"encoding/base64"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/types"

	"culvert.dev/connect"
	"culvert.dev/internal/testca"
	"culvert.dev/tunnel"
)

const mergePatch = types.MergePatchType

// entrance says where the west is entered, and by which carriers.
func (w *world) entrance(t *testing.T, transports string) {
	t.Helper()
	w.west.Apply(t, fmt.Sprintf(`
apiVersion: v1
kind: Service
metadata:
  name: entrance
  namespace: %[1]s
  annotations: {culvert.dev/gateway: west, culvert.dev/gateway-transports: %[2]q}
spec:
  ports: [{name: tls, port: 443}]
  externalIPs: ["%[3]s"]
`, system, transports, w.west.GatewayAddresses[0]))
}

// secret gives the east the right to look at the west.
func (w *world) secret(t *testing.T) {
	t.Helper()
	kubeconfig, err := os.ReadFile(w.west.ServiceAccountKubeconfig(t, system, "culvert"))
	if err != nil {
		t.Fatal(err)
	}
	w.east.Apply(t, fmt.Sprintf(`
apiVersion: v1
kind: Secret
metadata: {name: west, namespace: %s, labels: {culvert.dev/cluster: west}}
data: {kubeconfig: %s}
`, system, base64.StdEncoding.EncodeToString(kubeconfig)))
}

// workload is one that asks the west's gateway itself, by its certificate.
func (w *world) workload(t *testing.T, ca *testca.CA, id string) caller {
	t.Helper()
	pair, err := ca.Issue(testca.Options{SPIFFEID: id})
	if err != nil {
		t.Fatal(err)
	}
	cert, err := tls.X509KeyPair(pair.CertPEM, pair.KeyPEM)
	if err != nil {
		t.Fatal(err)
	}
	d := &connect.Dialer{
		Proxy: net.JoinHostPort(w.west.GatewayAddresses[0].String(), "443"),
		TLS:   &tls.Config{RootCAs: w.west.ca.Pool(), ServerName: "gw.west.example", Certificates: []tls.Certificate{cert}},
	}
	return caller{id, func(ctx context.Context) (string, error) { return ask(ctx, d) }}
}

// The administrator of the west says which gateways of other clusters may have a Service, by who
// they are. What the Service's owner says narrows that, and what the owner opens, the
// administrator can close.
func (w *world) federation(t *testing.T) {
	const (
		eastern  = "spiffe://east.example/ns/culvert-system/sa/culvert"
		northern = "spiffe://north.example/ns/culvert-system/sa/culvert"
		local    = "spiffe://west.example/ns/front/sa/job"

		ofCluster, ofNamespace = "ClusterAuthorizationPolicy", "AuthorizationPolicy"
	)
	d := &connect.Dialer{Proxy: net.JoinHostPort(w.machine.Addr.String(), "3128")}
	east := caller{"a client of the east", func(ctx context.Context) (string, error) { return ask(ctx, d) }}
	north := w.workload(t, w.north, northern)
	job := w.workload(t, w.west.ca, local)
	another := w.workload(t, w.east.ca, "spiffe://east.example/ns/front/sa/job")
	listener := w.west.GatewayAddresses[0].String() + ":443"

	everybody := func(step string) {
		for _, c := range []caller{east, north, job, another} {
			w.west.wantServed(t, step, c)
		}
	}
	everybody("without a policy")
	w.west.wantLog(t, "msg=tunnel", "peer="+eastern, "proto=connect-h2")

	w.policy(t, ofCluster, "exports", "{enforcementLevel: Network, tier: Baseline, action: ALLOW, targets: {namespaces: [shop]}, rules: [{sources: [{type: SPIFFE, spiffe: '"+eastern+"'}]}]}")
	for _, c := range []caller{north, job, another} {
		w.west.wantRefused(t, "of a Service for the gateway of the east", c, tunnel.Denied)
	}
	w.west.wantServed(t, "the gateway of the east", east)
	for _, id := range []string{northern, local} {
		w.west.wantLog(t, "msg=refused", "peer="+id, "reason=denied", "policy=exports", `policy_origin="ClusterAuthorizationPolicy exports"`)
		if out := w.west.explain(t.Context(), listener, w.machine.Addr, id); !strings.Contains(out, "refused: denied") || !strings.Contains(out, "denied by exports of ClusterAuthorizationPolicy exports, which allows others only") {
			t.Errorf("explain says of %s:\n%s\nwant the refusal by the policy", id, out)
		}
	}
	if out := w.west.explain(t.Context(), listener, w.machine.Addr, eastern); !strings.Contains(out, "allowed by exports of ClusterAuthorizationPolicy exports, rule 1") {
		t.Errorf("explain says of the gateway of the east:\n%s\nwant that the policy allows it", out)
	}

	// The owner opens the Service to the third cluster, in place of the default, until the
	// administrator denies that.
	w.policy(t, ofNamespace, "friends", "{enforcementLevel: Network, action: ALLOW, targetRefs: [{group: '', kind: Service, name: echo}], rules: [{sources: [{type: TrustDomain, trustDomain: north.example}]}]}")
	w.west.wantServed(t, "what the owner has opened", north)
	w.west.wantRefused(t, "what the owner has opened to others", east, tunnel.NoRoute) // as the gateway of the west says to clients
	w.west.wantLog(t, "msg=refused", "peer="+eastern, "reason=denied", "policy=shop/friends", `policy_origin="AuthorizationPolicy shop/friends"`)
	w.policy(t, ofCluster, "no-north", "{enforcementLevel: Network, tier: Admin, action: DENY, rules: [{sources: [{type: TrustDomain, trustDomain: north.example}]}]}")
	w.west.wantRefused(t, "what the administrator denies", north, tunnel.Denied)
	w.west.wantLog(t, "msg=refused", "peer="+northern, "reason=denied", "policy=no-north", `policy_origin="ClusterAuthorizationPolicy no-north"`)
	if out := w.west.explain(t.Context(), listener, w.machine.Addr, northern); !strings.Contains(out, "denied by no-north of ClusterAuthorizationPolicy no-north, rule 1") {
		t.Errorf("explain says of the gateway of the north:\n%s\nwant the refusal by the administrator", out)
	}
	w.noPolicy(t, ofNamespace, "friends")
	w.west.wantServed(t, "the default again", east)
	w.noPolicy(t, ofCluster, "exports")
	w.noPolicy(t, ofCluster, "no-north")
	everybody("without a policy any more")

	// The annotation opens a Service to networks, whoever asks from there; a policy counts after it.
	w.annotate(t, "culvert.dev/networks", "east")
	for _, c := range []caller{north, job, another} { // which come from elsewhere
		w.west.wantRefused(t, "exposed to the east", c, tunnel.NotExposed)
	}
	w.west.wantServed(t, "exposed to the east", east)
	w.policy(t, ofCluster, "nothing-of-the-east", "{enforcementLevel: Network, tier: Admin, action: DENY, targets: {names: [echo.shop.svc.west.mesh.internal]}, rules: [{sources: [{type: TrustDomain, trustDomain: east.example, networks: [east]}]}]}")
	w.west.wantRefused(t, "exposed to the east, and denied", east, tunnel.NoRoute)
	if out := w.west.explain(t.Context(), listener, w.machine.Addr, eastern); !strings.Contains(out, "denied by nothing-of-the-east of ClusterAuthorizationPolicy nothing-of-the-east, rule 1") {
		t.Errorf("explain says of the gateway of the east:\n%s\nwant the refusal by the administrator", out)
	}
	w.noPolicy(t, ofCluster, "nothing-of-the-east")
	w.west.wantServed(t, "exposed to the east, and no longer denied", east)
	w.annotate(t, "culvert.dev/networks", "")
	everybody("exposed to everybody")

	// Another carrier by the annotation of the entrance, with the same keys.
	w.entrance(t, "connect")
	w.west.Wait(t, soon, func(ctx context.Context) error {
		if _, err := east.ask(ctx); err != nil {
			return err
		}
		if !w.west.logged("msg=tunnel", "peer="+eastern, "proto=connect ") {
			return errors.New("the gateway of the east has not asked by connect")
		}
		return nil
	})
}
