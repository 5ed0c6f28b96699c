package cluster

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// volumes are the folders of a pod's volumes. Those of Secrets and ConfigMaps
// follow their objects, all files of one at once, as a kubelet does it: the
// names are links into ..data, and that is a link to a folder.
type volumes struct {
	k   *kubelet
	pod *corev1.Pod
	dir string

	mu      sync.Mutex // guards the following
	ctx     context.Context
	written map[string]string // what each has
	token   string
	renew   time.Time
	serial  int
}

func newVolumes(k *kubelet, pod *corev1.Pod, dir string) *volumes {
	return &volumes{k: k, pod: pod, dir: dir, written: map[string]string{}}
}

// path is the folder of a volume.
func (v *volumes) path(name string) (string, error) {
	for i := range v.pod.Spec.Volumes {
		vol := &v.pod.Spec.Volumes[i]
		if vol.Name == name {
			if vol.HostPath != nil {
				return vol.HostPath.Path, nil
			}
			return filepath.Join(v.dir, name), nil
		}
	}
	return "", fmt.Errorf("pod has no volume %q", name)
}

// write makes all volumes. It can be called again when it has failed.
func (v *volumes) write(ctx context.Context) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.ctx = ctx
	for i := range v.pod.Spec.Volumes {
		if err := v.one(&v.pod.Spec.Volumes[i]); err != nil {
			return err
		}
	}
	return nil
}

// refresh writes those again that have changed. What can't be read any more
// stays as it was, as with a kubelet.
func (v *volumes) refresh() {
	v.mu.Lock()
	defer v.mu.Unlock()
	for i := range v.pod.Spec.Volumes {
		_ = v.one(&v.pod.Spec.Volumes[i])
	}
}

// file is one of a volume.
type file struct {
	data []byte
	mode os.FileMode
}

func (v *volumes) one(vol *corev1.Volume) error {
	dir := filepath.Join(v.dir, vol.Name)
	files := map[string]file{}
	switch s := vol.VolumeSource; {
	case s.HostPath != nil:
		return nil
	case s.EmptyDir != nil:
		if err := os.MkdirAll(dir, 0o777); err != nil {
			return err
		}
		return os.Chmod(dir, 0o777)
	case s.Secret != nil:
		if err := v.secret(files, s.Secret.SecretName, s.Secret.Items, s.Secret.DefaultMode, s.Secret.Optional); err != nil {
			return err
		}
	case s.ConfigMap != nil:
		if err := v.configMap(files, s.ConfigMap.Name, s.ConfigMap.Items, s.ConfigMap.DefaultMode, s.ConfigMap.Optional); err != nil {
			return err
		}
	case s.DownwardAPI != nil:
		if err := v.downward(files, s.DownwardAPI.Items, s.DownwardAPI.DefaultMode); err != nil {
			return err
		}
	case s.Projected != nil:
		for _, p := range s.Projected.Sources {
			if err := v.projection(files, p, s.Projected.DefaultMode); err != nil {
				return err
			}
		}
	default:
		return fmt.Errorf("volume %q is of a kind that is not known here", vol.Name)
	}
	return v.replace(dir, vol.Name, files)
}

func (v *volumes) projection(files map[string]file, p corev1.VolumeProjection, mode *int32) error {
	switch {
	case p.Secret != nil:
		return v.secret(files, p.Secret.Name, p.Secret.Items, mode, p.Secret.Optional)
	case p.ConfigMap != nil:
		return v.configMap(files, p.ConfigMap.Name, p.ConfigMap.Items, mode, p.ConfigMap.Optional)
	case p.DownwardAPI != nil:
		return v.downward(files, p.DownwardAPI.Items, mode)
	case p.ServiceAccountToken != nil:
		return v.accountToken(files, p.ServiceAccountToken)
	}
	return fmt.Errorf("a projected source is of a kind that is not known here")
}

func (v *volumes) secret(files map[string]file, name string, items []corev1.KeyToPath, mode *int32, optional *bool) error {
	s, err := v.k.secrets.Secrets(v.pod.Namespace).Get(name)
	if err != nil {
		if apierrors.IsNotFound(err) && value(optional, false) {
			return nil
		}
		return err
	}
	return choose(files, s.Data, items, mode, optional)
}

func (v *volumes) configMap(files map[string]file, name string, items []corev1.KeyToPath, mode *int32, optional *bool) error {
	m, err := v.k.configMaps.ConfigMaps(v.pod.Namespace).Get(name)
	if err != nil {
		if apierrors.IsNotFound(err) && value(optional, false) {
			return nil
		}
		return err
	}
	data := map[string][]byte{}
	for k, s := range m.Data {
		data[k] = []byte(s)
	}
	for k, b := range m.BinaryData {
		data[k] = b
	}
	return choose(files, data, items, mode, optional)
}

// choose takes all keys, or those that are listed.
func choose(files map[string]file, data map[string][]byte, items []corev1.KeyToPath, mode *int32, optional *bool) error {
	usual := os.FileMode(value(mode, 0o644))
	if len(items) == 0 {
		for k, b := range data {
			files[k] = file{b, usual}
		}
	}
	for _, i := range items {
		b, ok := data[i.Key]
		if !ok {
			if value(optional, false) {
				continue
			}
			return fmt.Errorf("there is no key %q", i.Key)
		}
		files[i.Path] = file{b, os.FileMode(value(i.Mode, int32(usual)))}
	}
	return nil
}

func (v *volumes) downward(files map[string]file, items []corev1.DownwardAPIVolumeFile, mode *int32) error {
	w := v.k.worker(v.pod.UID)
	for _, i := range items {
		if i.FieldRef == nil || w == nil {
			return fmt.Errorf("file %q of the downward API is not of a field", i.Path)
		}
		s, err := w.field(w.spec(), i.FieldRef.FieldPath)
		if err != nil {
			return err
		}
		files[i.Path] = file{[]byte(s), os.FileMode(value(i.Mode, value(mode, 0o644)))}
	}
	return nil
}

// accountToken asks for a token that is bound to the pod, and for a new one
// when most of its time is over.
func (v *volumes) accountToken(files map[string]file, p *corev1.ServiceAccountTokenProjection) error {
	if time.Now().After(v.renew) {
		audiences := []string{}
		if p.Audience != "" {
			audiences = append(audiences, p.Audience)
		}
		r, err := v.k.c.Client.CoreV1().ServiceAccounts(v.pod.Namespace).CreateToken(v.ctx, v.pod.Spec.ServiceAccountName, &authenticationv1.TokenRequest{
			Spec: authenticationv1.TokenRequestSpec{
				Audiences: audiences, ExpirationSeconds: p.ExpirationSeconds,
				BoundObjectRef: &authenticationv1.BoundObjectReference{Kind: "Pod", APIVersion: "v1", Name: v.pod.Name, UID: v.pod.UID},
			},
		}, metav1.CreateOptions{})
		if err != nil {
			return err
		}
		v.token = r.Status.Token
		v.renew = time.Now().Add(time.Until(r.Status.ExpirationTimestamp.Time) * 8 / 10)
	}
	// Readable for the pod's user, whoever that is.
	files[p.Path] = file{[]byte(v.token), 0o644}
	return nil
}

// replace makes files the folder's content, at once.
func (v *volumes) replace(dir, name string, files map[string]file) error {
	now := fmt.Sprint(files)
	if old, ok := v.written[name]; ok && old == now {
		return nil
	}
	v.serial++
	data := fmt.Sprintf("..%d", v.serial)
	var group *int64
	if s := v.pod.Spec.SecurityContext; s != nil {
		group = s.FSGroup
	}
	if err := os.MkdirAll(filepath.Join(dir, data), 0o755); err != nil {
		return err
	}
	for path, f := range files {
		if !filepath.IsLocal(path) {
			return fmt.Errorf("file %q is not within volume %q", path, name)
		}
		to := filepath.Join(dir, data, path)
		if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
			return err
		}
		if group != nil {
			f.mode |= 0o440
		}
		if err := os.WriteFile(to, f.data, f.mode); err != nil {
			return err
		}
		if group != nil {
			if err := os.Chown(to, -1, int(*group)); err != nil {
				return err
			}
		}
	}
	old, _ := os.Readlink(filepath.Join(dir, "..data"))
	_ = os.Remove(filepath.Join(dir, "..next"))
	if err := os.Symlink(data, filepath.Join(dir, "..next")); err != nil {
		return err
	}
	if err := os.Rename(filepath.Join(dir, "..next"), filepath.Join(dir, "..data")); err != nil {
		return err
	}
	top := map[string]bool{}
	for path := range files {
		first, _, _ := strings.Cut(path, "/")
		top[first] = true
		err := os.Symlink(filepath.Join("..data", first), filepath.Join(dir, first))
		if err != nil && !os.IsExist(err) {
			return err
		}
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if !strings.HasPrefix(e.Name(), "..") && !top[e.Name()] {
			_ = os.Remove(filepath.Join(dir, e.Name()))
		}
	}
	if old != "" {
		_ = os.RemoveAll(filepath.Join(dir, old))
	}
	v.written[name] = now
	return nil
}
