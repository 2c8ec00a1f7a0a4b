#!/bin/bash
#SBATCH --job-name=gpt
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=04:00:00
#SBATCH --requeue

# accel reads the rank and the first node's address from SLURM's variables.
# After a requeue, --resume continues from the last checkpoint.
export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK
export ACCEL_BACKEND=fsdp
srun python examples/pretrain_gpt.py --precision bf16-mixed --resume --out "$SCRATCH/gpt"
