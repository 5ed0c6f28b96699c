package gatewayapi

import (
	"bytes"
	"encoding/pem"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// Steps of what becomes of a Secret. Each is what makes of the world that there
// was one in which it happens.
var (
	spoil = func(_ *Inputs, s *corev1.Secret) *corev1.Secret {
		s.Data = map[string][]byte{"tls.crt": s.Data["tls.crt"], "tls.key": []byte("half of it")}
		return s
	}
	garble = func(_ *Inputs, s *corev1.Secret) *corev1.Secret {
		s.Data = map[string][]byte{"tls.crt": []byte("Hello world"), "tls.key": s.Data["tls.key"]}
		return s
	}
	empty = func(_ *Inputs, s *corev1.Secret) *corev1.Secret {
		s.Data = map[string][]byte{"tls.crt": nil, "tls.key": nil}
		return s
	}
	mend = func(_ *Inputs, s *corev1.Secret) *corev1.Secret {
		cert, key := pair()
		s.Data = map[string][]byte{"tls.crt": []byte(cert), "tls.key": []byte(key)}
		return s
	}
	remove  = func(*Inputs, *corev1.Secret) *corev1.Secret { return nil }
	replace = func(w *Inputs, s *corev1.Secret) *corev1.Secret { s.UID += "'"; return spoil(w, s) }
	restart = func(w *Inputs, s *corev1.Secret) *corev1.Secret { w.memo = newMemo(); return s }
	revoke  = func(w *Inputs, s *corev1.Secret) *corev1.Secret { w.Grants = nil; return s }
)

// A Secret that is spoiled leaves what it had before in force, and says so; one
// that is gone, emptied, of another's name, or not for us any more does not.
func TestSpoiledSecrets(t *testing.T) {
	const grant = `
---
kind: ReferenceGrant
metadata: {namespace: b, name: g}
spec: {from: [{group: gateway.networking.k8s.io, kind: Gateway, namespace: a}], to: [{group: '', kind: Secret}]}
`
	type step = func(*Inputs, *corev1.Secret) *corev1.Secret
	for _, tt := range []struct {
		name  string
		steps []step
		serve bool
		why   string // in the listener's ResolvedRefs; "" means that this is true
	}{
		{"good", nil, true, ""},
		{"a key of another", []step{spoil}, true, "stays in force"},
		{"no PEM", []step{garble}, true, "stays in force"},
		{"twice", []step{spoil, garble}, true, "stays in force"},
		{"mended", []step{spoil, mend}, true, ""},
		{"mended and spoiled again", []step{spoil, mend, garble}, true, "stays in force"},
		{"deleted", []step{remove}, false, "there is no Secret"},
		{"spoiled and deleted", []step{spoil, remove}, false, "there is no Secret"},
		{"emptied", []step{empty}, false, "are empty"},
		{"emptied and spoiled", []step{empty, spoil}, false, "do not match"},
		{"another of its name", []step{replace}, false, "do not match"},
		{"spoiled before a restart", []step{spoil, restart}, false, "do not match"},
		{"without its grant", []step{revoke}, false, "no ReferenceGrant"},
		{"spoiled, and without its grant", []step{spoil, revoke}, false, "no ReferenceGrant"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			memo := newMemo()
			listener := "  - {name: tls, port: 443, protocol: TLS, tls: {mode: Terminate, certificateRefs: [{name: cert, namespace: b}]}}\n"
			w := inputsOf(t, base, edge(listener)+strings.ReplaceAll(secret, "namespace: a", "namespace: b")+grant)
			w.PublicAddresses, w.memo = addrs("192.0.2.1"), memo
			secrets := w.Objects.(*fixture).secrets
			res := Translate(w)
			for _, do := range tt.steps {
				if s := do(w, secrets["b/cert"].DeepCopy()); s != nil {
					secrets["b/cert"] = s
				} else {
					delete(secrets, "b/cert")
				}
				res = Translate(w)
			}
			l := res.Gateways[types.NamespacedName{Namespace: "a", Name: "edge"}].Listeners[0]
			programmed, _ := allTrue(l.Conditions, "Programmed")
			resolved, why := allTrue(l.Conditions, "ResolvedRefs")
			ends := res.Snapshot.Listeners[0].Sections[0].TLS
			cert, _ := pair()
			block, _ := pem.Decode([]byte(cert))
			serves := ends != nil && slices.ContainsFunc(ends.Keys, func(name string) bool { return bytes.Equal(res.Keys[name].Certificate[0], block.Bytes) })
			if serves != tt.serve || programmed != tt.serve {
				t.Errorf("got a certificate: %t, Programmed: %t, want %t", serves, programmed, tt.serve)
			}
			if resolved != (tt.why == "") || !strings.Contains(why, tt.why) {
				t.Errorf("got ResolvedRefs %t, %q, want %q", resolved, why, tt.why)
			}
		})
	}
}

// What is shown to backends is held to the same; without a certificate nothing
// is sent to them.
func TestSpoiledClientCertificate(t *testing.T) {
	policy := `
---
kind: BackendTLSPolicy
metadata: {namespace: a, name: p}
spec: {targetRefs: [{group: '', kind: Service, name: web}], validation: {hostname: web.example, wellKnownCACertificates: System}}
`
	w := inputsOf(t, base, edge(terminate, "tls: {backend: {clientCertificateRef: {name: cert}}}")+secret+strings.ReplaceAll(secret, "name: cert", "name: own")+testRoute("TLSRoute", "r", "abc.example.com", "{name: web, port: 443}")+policy)
	w.Gateways[0].Spec.Listeners[0].TLS.CertificateRefs[0].Name = "own"
	w.PublicAddresses, w.memo = addrs("192.0.2.1"), newMemo()
	secrets := w.Objects.(*fixture).secrets
	Translate(w)
	secrets["a/cert"] = garble(w, secrets["a/cert"].DeepCopy())
	expect(t, Translate(w), `
		gateway a/edge ResolvedRefs=False/InvalidClientCertificateRef
		rule gateway/a/edge/tls tlsroute/a/r [abc.example.com] 1:a/web(10.244.0.1:8443)+tls:web.example+cert
	`)
	delete(secrets, "a/cert")
	expect(t, Translate(w), `
		gateway a/edge ResolvedRefs=False/InvalidClientCertificateRef
		rule gateway/a/edge/tls tlsroute/a/r [abc.example.com] 1:broken
	`)
}

// CAs have no before: the one that was withdrawn may be the very reason.
func TestSpoiledCAs(t *testing.T) {
	w := inputsOf(t, base, edge(terminate, "tls: {frontend: {default: {validation: {caCertificateRefs: [{group: '', kind: ConfigMap, name: ca}]}}}}")+secret+caMap)
	w.PublicAddresses, w.memo = addrs("192.0.2.1"), newMemo()
	maps := w.Objects.(*fixture).configMaps
	Translate(w)
	m := maps["a/ca"].DeepCopy()
	m.Data["ca.crt"] = "Hello world"
	maps["a/ca"] = m
	expect(t, Translate(w), `
		listener a/edge tls Accepted=False/NoValidCACertificate
		!open
	`)
}

// A slip in a Secret changes nothing of what is served, and is told.
func TestControllerServesOnAfterASlip(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, edge(terminate)+secret+testRoute("TLSRoute", "r", "abc.example.com", "{name: web, port: 80}"))
		defer b.start()()
		calm()
		b.last()
		s, err := b.core.CoreV1().Secrets("a").Get(t.Context(), "cert", metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := b.core.CoreV1().Secrets("a").Update(t.Context(), spoil(nil, s), metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
		calm()
		if u := b.last(); u != nil {
			t.Errorf("got %+v, want no other table", u)
		}
		cs := b.gateway("edge").Status.Listeners[0].Conditions
		if !has(cs, "Programmed", "True", "Programmed") || !has(cs, "ResolvedRefs", "False", "InvalidCertificateRef") {
			t.Errorf("got %+v", cs)
		}
		if err := b.core.CoreV1().Secrets("a").Delete(t.Context(), "cert", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		calm()
		if u := b.last(); u == nil || u.Listeners[0].Sections[0].TLS != nil {
			t.Errorf("got %+v once it is gone, want nothing to end TLS with", u)
		}
	})
}

// A Secret that is deleted and made anew at once changes nothing for clients; one that
// stays away takes its certificate out of force within seconds, and the condition says
// both.
func TestASecretThatIsReplaced(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, edge(terminate)+secret+testRoute("TLSRoute", "r", "abc.example.com", "{name: web, port: 443}"))
		defer b.start()()
		calm()
		if u := b.last(); u == nil || u.Listeners[0].Sections[0].TLS == nil {
			t.Fatalf("got %+v, want a listener where TLS ends", u)
		}
		secrets := b.core.CoreV1().Secrets("a")
		s, err := secrets.Get(t.Context(), "cert", metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		remove := func() {
			if err := secrets.Delete(t.Context(), "cert", metav1.DeleteOptions{}); err != nil {
				t.Fatal(err)
			}
		}
		remove()
		time.Sleep(secretGrace / 2)
		synctest.Wait()
		refs := func() metav1.Condition {
			for _, c := range b.gateway("edge").Status.Listeners[0].Conditions {
				if c.Type == "ResolvedRefs" {
					return c
				}
			}
			return metav1.Condition{}
		}
		if c := refs(); c.Status != metav1.ConditionFalse || !strings.Contains(c.Message, "the previous certificate stays in force for 3s") {
			t.Errorf("got %+v while it is away", c)
		}
		again := s.DeepCopy()
		again.UID, again.ResourceVersion = "another", ""
		if _, err := secrets.Create(t.Context(), again, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		calm()
		for _, u := range b.all() {
			if u.Err != nil || u.Listeners[0].Sections[0].TLS == nil {
				t.Errorf("got %+v, want that TLS ends all the time", u)
			}
		}
		if c := refs(); c.Status != metav1.ConditionTrue {
			t.Errorf("got %+v when it is there again", c)
		}
		remove()
		calm()
		if u := b.last(); u == nil || u.Listeners[0].Sections[0].TLS != nil {
			t.Errorf("got %+v, want nothing in force of a Secret that stays away", u)
		}
	})
}
